"""Losses of logits that are never materialised whole: the operator, its pattern, its rules and its price."""
