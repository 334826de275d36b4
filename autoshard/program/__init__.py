"""The local program: from a graph and its decisions to what one rank runs."""
