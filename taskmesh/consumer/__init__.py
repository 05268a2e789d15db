"""Running tasks.

Read `worker` first: it has the diagram, and makes all the others. Then, as a task passes: `listening`, `listener`, `scanner`,
`queues`, `backup_claims`, `claim_queue`, `partitions`, `limits`, `claim_filter`, `claimer`, `execution`, `executions`,
`executor`, `outcome` (for child processes the room `subprocess`), `transactions`, `together`, `pinger`, `reporter`,
`finisher`; then `life`, `stopping` and `idleness`; beside them `settings`, `registration`, `unserved`, `ticker`, `context`,
`logs`, `tracing`, `signals`.
"""
