"""Large problems under a memory limit, as flat arrays that numba's loops run over.

`Network` remembers what equal tables gave, which is what long stacks of equal layers need, and pays some
microseconds for every operation. Problems of tens of thousands of different nodes, whose optimum is a matter of who
may use memory when, need millions of small steps instead: those are the loops here.
"""
