"""What is stored, as types. No I/O."""
