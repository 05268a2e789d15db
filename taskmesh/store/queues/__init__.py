"""What concerns a queue as a whole: `limits`, pauses after failures (`failure_pauses`), and what is due in its `groups`."""
