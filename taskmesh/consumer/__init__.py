"""Running tasks.

Start with `worker`: it has the diagram, and creates all other parts. Its parts are beside it, in the order in which a task passes
them: `listener`, `scanner`, `claimer`, `executor`. What they work with is in packages, and each of these needs only those further
down in this list:

- `subprocess`: executions in child processes
- `durable`: what an execution records while it goes on, so that the next one resumes there
- `candidates`: tasks that could be claimed, between those that find them and the one that claims them
- `run`: executions, their outcomes, and what renews their leases

The life of a worker: `life`, `stopping`, `idleness`, `signals`, `lifespan`. What it says about itself: `registration`,
`worker_stats`, `observer`, `logs`. What else it does: `ticker` (schedules), `loops`, `broadcasts`, `unserved`. What users set:
`settings`, `hooks`.
"""
