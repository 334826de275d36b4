"""Losses of logits that are never held whole: the operator, its pattern, its rules and its price."""
