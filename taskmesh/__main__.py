"""`python -m taskmesh`: the same as the command `taskmesh`, in exactly this Python."""

from taskmesh.cli import main

main()
