"""Tasks that could be claimed, on their way from those that find them (`listener`, `scanner`) to the one that claims them.

`claim_queue` holds them in the order of `turns`. `listening`, `inserted_tasks`, `queues` and `groups` say where to look;
`partitions` and `backup_claims` keep workers from trying the same tasks; `limits` with `slots`, and `failure_counts`, keep queues
within their limits; `claim_filter` is the user's own filter.
"""
