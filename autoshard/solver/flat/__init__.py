"""Large problems under a memory limit, as flat arrays that numba's loops run over.

`Network` caches the results of equal tables, which suits long stacks of equal layers, and pays some microseconds for
every operation. Problems of tens of thousands of different nodes under a memory limit need millions of small steps
instead: the loops of this package.
"""
