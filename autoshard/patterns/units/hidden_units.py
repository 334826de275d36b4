"""Recurrent layers whose hidden units are shared by the ranks of an axis.

Every rank has the gates of its own units, and so a strided shard of everything whose dim is gates side by side. Before
each time step the ranks put their parts of the state together, and in the backward half each step sums what all ranks
have for the state before it. These collectives stand inside the time loop, which is one operator: a graph does not grow
with the sequence. `autoshard::lstm_steps_shared` and its like are the operators of `capture.recurrence` with the groups
of ranks as further arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from autoshard.capture.recurrence import OPERATORS, steps
from autoshard.patterns._torch import OpOverload
from autoshard.patterns.exchanging import CollectiveRunner, define
from autoshard.patterns.local import LocalCall
from autoshard.patterns.ops._helpers import shape_of
from autoshard.patterns.rule import Exchange, OpCall
from autoshard.patterns.strategy import local_size
from autoshard.specs.emitter import collectives


@dataclass(frozen=True, slots=True)
class SharedUnits:
    """The hidden units are shared by the ranks of some groups, in blocks of which the last may be padded.

    Attributes:
        groups: names of process groups, that of the innermost axis first.
        ranks: how many there are in each.
        units: how many hidden units the ranks of each group have together.
        collective: runs a collective and waits for it.
    """

    groups: Sequence[str]
    ranks: Sequence[int]
    units: Sequence[int]
    collective: CollectiveRunner

    def all_gather(self, state: Tensor) -> Tensor:
        """See `time_loops.HiddenUnits`."""
        rows = state.t()  # collectives stack and scatter the first dim
        for group, ranks, units in zip(self.groups, self.ranks, self.units, strict=True):
            op = collectives.all_gather_into_tensor.default
            rows = self.collective(op, rows.contiguous(), ranks, group)[:units]
        return rows.t()

    def reduce_scatter(self, gradient: Tensor) -> Tensor:
        """See `time_loops.HiddenUnits`."""
        rows = gradient.t()
        for group, ranks, units in reversed(list(zip(self.groups, self.ranks, self.units, strict=True))):
            rows = pad(rows, (0, 0, 0, -units % ranks)).contiguous()
            rows = self.collective(collectives.reduce_scatter_tensor.default, rows, "sum", ranks, group)
        return rows.t()


def exchanges(call: OpCall) -> list[Exchange]:
    """What is sent where the hidden units are shared: the state of all samples, or its gradient, at every time step."""
    per_step = call.results[0]
    assert per_step is not None
    times, samples, _ = per_step.shape
    state = samples * shape_of(call, "weight")[1] * per_step.dtype.itemsize
    return [("reduce_scatter" if call.op._schema.name.endswith("backward") else "all_gather", state, times)]


def run_shared_units(call: LocalCall) -> Any:
    """The local program: the operator itself where no axis shares its hidden units `h`."""
    axes = call.axes("h")[::-1]
    if not axes:
        return call.run()
    (factor,) = call.rule.indices("h")
    return call.run(
        _SHARED_OPS[call.call.op],
        groups=[call.emit.group(axis) for axis in axes],
        ranks=[call.mesh.sizes[axis] for axis in axes],
        units=[local_size(call.rule, call.choices, call.mesh, factor, axis) for axis in axes],
    )


def _define_shared_op(name: str, loop: Callable[..., Any], shapes: Callable[..., Any]) -> OpOverload:
    """The operator `name` with groups of ranks as further arguments."""

    def program(*args: Any, collective: CollectiveRunner, **shared: Any) -> Any:
        return loop(*args, units=SharedUnits(**shared, collective=collective))

    text = str(getattr(steps, name).default._schema).replace(name, f"{name}_shared").partition("::")[2]
    schema = text.replace(") ->", ", *, str[] groups, int[] ranks, int[] units) ->", 1)
    return define(schema, program, lambda *args, **shared: shapes(*args))


_SHARED_OPS = {getattr(steps, name).default: _define_shared_op(name, *pair) for name, pair in OPERATORS.items()}
