"""What an execution records while it goes on, so that the next one resumes there: steps, waits, children, transactions.

Start with `journal`, which is the handler's side of it. `starts` are the children and the tasks that a handler publishes;
`journal_in_thread` is the journal for handlers in threads; `transactions` commits with the user's writes, and `together` several
of one task.
"""
