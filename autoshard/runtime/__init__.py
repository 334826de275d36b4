"""The module at work: its parameters, its steps, its files, and the agreement of its ranks."""
