"""Tools around the library: the command line, comparisons, checks, and questions about plans. Nothing imports them."""
