"""Running tasks.

Read `worker` and `parts` first; then, as a task passes: `listener`, `scanner`, `second_look`, `claim_queue`, `lanes`, `limits`,
`claimer`, `execution`, `executor`, `ending` (for child processes `conversation`, `processes`, `child`, `handler_reference`),
`transactions`, `pinger`, `reporter`, `finisher`; then `stopping` and `idleness`; and beside them `settings`, `registration`,
`neglected`, `ticker` and `signals`.
"""

from taskmesh.consumer.worker import Consumer

__all__ = ["Consumer"]
