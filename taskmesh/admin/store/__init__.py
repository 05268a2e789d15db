"""The queries for people: nobody on a task's path needs them."""
