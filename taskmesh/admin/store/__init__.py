"""The queries for people. Nothing on a task's path needs them."""
