"""Search for the mesh itself: the axes for a number of devices, with and without a pipeline."""
