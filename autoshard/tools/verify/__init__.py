"""Comparison of the programs of a plan with one device, in float64, without processes and without GPUs."""
