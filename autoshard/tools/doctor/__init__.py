"""The report on what of a model can be captured and planned."""
