"""Rows sent to groups and back, as in a mixture of experts: operators, their pattern, and their rules."""
