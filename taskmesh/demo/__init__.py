"""The demo: a real job on real input, with a worker killed half-way, and every result checked.

For every `.py` file of the running Python's standard library a task tokenizes it and counts lines and tokens. Three worker
processes do it, on the embedded MongoDB; one of them gets SIGKILL while it holds tasks.

counting.py  what one task does, as a plain function: the workers and the check at the end both call it
tasks.py     the mesh that the workers run
board.py     what has happened so far, and how it is shown
job.py       publish, run, kill, publish again
check.py     nothing lost, nothing doubled, every result right
"""

from __future__ import annotations

from taskmesh.demo.job import Job

__all__ = ["Job"]
