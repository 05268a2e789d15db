"""The promises, by name. What each means, what holds it and what attacks it, stands in `docs/invariants.md`."""

from __future__ import annotations

INVARIANTS = {
    "C1": "never more live and successful entries than concurrent_worker_cnt",
    "C2": "never two live or successful entries of one worker in one task",
    "C3": "never more handlers of a task at work than concurrent_worker_cnt",
    "F1": "only the execution that holds a live lease changes its entry",
    "F2": "a SUCCESS, once recorded, stays",
    "F3": "name, key, and time of creation of a task never change",
    "G1": "no execution starts before start_time, or before a delay that a handler asked for is over",
    "G2": "no execution starts after expire_time",
    "G3": "only workers that are allowed claim a task",
    "G4": "a finished or cancelled task is not claimed",
    "G5": "the retry delay is kept",
    "G6": "nothing starts from a queue that has been paused for longer than its workers need to hear of it",
    "B1": "no more failures than max_unexpected_retries allows",
    "B2": "no more lost executions in a row than max_timeouts allows",
    "R1": "a release costs nothing",
    "R2": "every lost lease is counted, and no other",
    "D1": "status, next_claim_time and what else is derived agree with the entries",
    "P1": "published once is published: one publisher created it, and it is there",
    "P2": "nothing is there that nobody published",
    "P3": "what was asked for once is done once at most, and to no task published after it",
    "L1": "no task is lost: every one comes to the end that it should",
    "S1": "a task that SUCCEEDed has concurrent_worker_cnt SUCCESS entries of different workers",
    "S2": "every SUCCESS and every FAIL is what a handler really did, on that worker, in that execution",
    "H1": "every run of a handler was claimed, and each claim runs it once at most",
    "X1": "what a handler writes in transaction() is there exactly if its SUCCESS is",
    "X2": "what a handler publishes is there exactly if its SUCCESS is",
    "X3": "a conflict inside transaction() is charged to nobody, but the hundredth in a row",
    "O1": "events tell of every task what happened, in that order, or say that some may be missing",
}
