"""Executions, from the claim to the recorded outcome. The executor, beside this package, takes them through it.

`execution` is one attempt at one task; `executions` are all of a worker. `context` is what its handler sees of it,
`stop_reasons` say why it is told to stop, `outcome` judges how it ended. `pinger` renews the leases, `reporter` writes progress,
`finisher` writes outcomes.
"""
