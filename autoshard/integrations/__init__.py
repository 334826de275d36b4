"""Trainers and loops of other libraries around a parallelised module; each file needs the package of its name."""
