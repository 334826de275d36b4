"""Mesh axes, specs, and the meaning of a spec for a real tensor."""
