"""The local program: from a graph and its decisions to the program of one rank."""
