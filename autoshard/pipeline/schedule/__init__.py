"""Orders of the actions of a step, and their simulation."""
