"""Running tasks.

Read `consumer` first; then, as a task passes: `listener`, `scanner`, `claim_queue`, `lanes`, `claimer`,
`execution`, `executor`, `pinger`, `reporter`, `finisher`; and beside them `registration` and `signals`.
"""

from taskmesh.consumer.consumer import Consumer

__all__ = ["Consumer"]
