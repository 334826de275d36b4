"""Capture: one functional graph of forward and backward from a module and an example call.

Way of a module: `joint.py` makes a `StateWatch`, which holds a fake copy of the module (`python/fake_module.py`) and
all that is noted of Python. `export.py` wraps `forward` of the copy once: every watch begins and ends there.
`describe.py` makes a simplified `JointGraph` of the traced graph. For pipelines, `step_marks.py` marks which operator
of `forward` a node belongs to.

Python's semantics of `forward` are in `python/`. State that it reads and sets, buffers and attributes that it assigns:
`state.py`, `guards.py`; objects and lists: `reachable.py`, `mutations.py`. Questions about numbers (`if x.sum() > 0`),
and numbers that only count: `data_reads.py`, `conditions.py`, `counters.py`. Code that changes gradients (autograd
functions, hooks): `gradient_code.py`, `called_code.py`; hooks of submodules: `module_hooks.py`. Draws from Python's
generators: `host_random.py`. Objects in results: `returned_objects.py`.

Beside it: what autograd knows of outputs, and gradients of one output for another: `output_history.py`,
`output_taps.py`; outputs that training does not read: `unread_outputs.py`; replacements of torch's functions, which the
room `operators` fills: `replacements.py`; devices that code names: `capture_device.py`; questions about nodes:
`nodes.py`; layers, and recomputation in the graph: `recomputation.py`, `backward_copies.py`; values that are moved to
the host: `offloading.py`, `host_copies.py`; mixed precision as casts: `mixed_precision.py`; dynamic sizes:
`dynamic.py`, `symbols.py`.

Deep modules that are only planned are captured with a few of their equal layers (`depth.py`). `repeated_layers.py`
finds these layers, in periods such as two alternating kinds; `continuation.py` predicts a deeper graph from two. The
graph is taken only if a third capture is what two predict, node by node, and a record of the operators of `forward` at
full depth (`forward_record.py`) is what records at two depths predict.
"""

from __future__ import annotations

from autoshard.capture._torch import outside_modes
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph, JointInput, JointOutput, capture
from autoshard.capture.marks import shard

__all__ = ["BoundCall", "JointGraph", "JointInput", "JointOutput", "capture", "outside_modes", "shard"]
