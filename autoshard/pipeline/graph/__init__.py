"""The forward graph of a model, cut into stages."""
