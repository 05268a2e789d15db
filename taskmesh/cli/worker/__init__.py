"""`taskmesh worker`: one process, or a supervisor with several.

In reading order: `command` (what was asked for), `process` (one worker, from its start to its end), `supervisor` and `child`
(several), `force_exit` (signals, and the end of what hangs), `endpoints` (probes and metrics), `system`.
"""
