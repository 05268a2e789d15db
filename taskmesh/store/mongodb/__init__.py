"""MongoDB's driver and what surrounds its calls: cancellation, errors, and inserts that go out together.

`driver` is the seam between PyMongo, Motor and the rest. No cancellation cuts a call of it short (`uncut`, with `first_step`).
`server_errors` says what an error means. `inserts` sends the inserts of one moment as one command.
"""
