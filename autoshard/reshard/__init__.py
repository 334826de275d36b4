"""Resharding from spec to spec along the cheapest path of collectives, priced and lowered.

Paths and tables of pairs: `path.py`; lowering to collectives: `lower.py`. `collective_schedule.py` joins the gathers of
a layer, starts them early and awaits them late. `reductions.py` joins reductions in buckets, or defers them.
"""
