"""The pattern library: how every operator may be split over a mesh axis, and what each rank then runs.

Rules by family: `ops/`; variants that the graph around an operator allows: `graph_variants.py`; proofs of rules:
`soundness.py`, `lockstep.py`. Local programs read like torch, on values that pass operations to the emitter
(`local.py`); operators that exchange inside: `exchanging.py`. Padding and its masks: `padding.py`. Strategies and their
specs: `strategy.py`. Cuts of dims along equal factors: `propagation.py`. An operator without a rule borrows the
strategies of torch's registry (`borrowed.py`), or is replicated.
"""

from __future__ import annotations

from autoshard.patterns import ops as ops  # registers the rules
from autoshard.patterns.soundness import Finding, check

__all__ = ["Finding", "check"]
