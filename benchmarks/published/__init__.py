"""The tables of the three papers, one module per part; `benchmarks/papers.py` prints them and writes docs/papers.md."""
