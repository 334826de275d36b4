"""Rows that are sent to groups and back, as a mixture of experts does: operators, their pattern, and their rules."""
