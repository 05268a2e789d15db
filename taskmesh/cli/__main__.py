"""`python -m taskmesh.cli`: the same as `taskmesh`, in exactly this Python."""

from taskmesh.cli import main

main()
