"""Running tasks.

Start with `worker`: it has the diagram, and creates all other parts. Then read in the order in which a task passes:
`listening`, `listener`, `scanner`, `queues`, `backup_claims`, `claim_queue`, `partitions`, `limits`, `claim_filter`, `claimer`,
`execution`, `executions`, `executor`, `outcome` (for child processes: the package `subprocess`), `transactions`, `together`,
`pinger`, `reporter`, `finisher`. The life of a worker: `life`, `stopping`, `idleness`. Around them: `settings`, `registration`,
`unserved`, `ticker`, `context`, `logs`, `tracing`, `signals`.
"""
