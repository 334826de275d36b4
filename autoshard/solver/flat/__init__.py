"""Compiled loops over flat arrays: the rules of presolve, prices on memory over time, and search in neighbourhoods.

Problems of tens of thousands of nodes under a memory limit need millions of small steps.
"""
