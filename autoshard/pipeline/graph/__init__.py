"""The forward graph of a model, and its cut into stages."""
