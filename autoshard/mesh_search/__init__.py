"""The choice of the mesh itself: which axes a number of devices should have, with and without a pipeline."""
