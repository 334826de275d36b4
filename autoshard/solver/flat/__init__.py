"""Compiled loops over flat arrays: presolve, prices on memory over time, and neighbourhood search.

Problems of tens of thousands of nodes under a memory limit need millions of small steps.
"""
