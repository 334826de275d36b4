"""Search for the mesh itself: the axes of a number of devices, with and without a pipeline."""
