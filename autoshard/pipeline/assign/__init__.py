"""Which operators are which stage, and which devices run it."""
