"""Other people's systems: each optional, each one file."""
