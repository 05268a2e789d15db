"""`run="process"`: handlers in processes of their own."""
