"""Tasks that concern one another: `dependencies` (one waits for others), `children` (started by a handler), `sequences` (lines).

Flows are published and cancelled as a whole, by the verbs for single tasks: see `flows`, beside this package.
"""
