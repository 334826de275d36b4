"""Orders of a step's actions, and their simulation."""
