"""Operators of our own: kernel, backward, sharding rule, variants and price of each, and what it replaces in models.

A module or a folder for each. Importing the room defines the operators, registers their rules and prices, and installs
in `capture` the replacements of torch's functions. Every entry point of the library imports it before a capture; a
capture without it is an error.

`attention/`: operator, kernels, FlexAttention, masks that are flags. `recurrent/`: layers, steps and cells. `routed/`:
rows that go to groups and back. `large_losses/`: losses in pieces. `norms.py`, `bags.py`, `ctc.py`; functions that
torch would decompose: `composites.py`. Operators are defined by `autoshard/operator_library.py`, since other rooms
define some that exchange or copy.
"""

from __future__ import annotations

from autoshard.operators import registration as registration  # installs what captures use
from autoshard.operators.attention import attention_rules as attention_rules
from autoshard.operators.large_losses import logit_statistics as logit_statistics
from autoshard.operators.recurrent import recurrent_rules as recurrent_rules
from autoshard.operators.routed import routed_rows as routed_rows
