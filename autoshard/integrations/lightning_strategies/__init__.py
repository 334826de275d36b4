"""The strategies for Lightning, without their base classes."""
