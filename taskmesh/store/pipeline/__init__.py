"""What the pipelines of several verbs have in common. The rule itself is `rules`, beside this package.

`restart` is how a task starts again, `event_stamp` how a write announces itself. `plain` has the conditions of the short
forms. `by_id` gives each document of one update values of its own, `prepared` builds what never changes once, and `repeated`
makes a verb safe to send again.
"""
