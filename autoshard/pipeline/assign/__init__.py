"""The assignment of operators to stages, and of stages to devices."""
