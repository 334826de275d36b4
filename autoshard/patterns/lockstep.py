"""All ranks of a mesh in one process, without process groups: an emitter whose values are one tensor per rank."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch

from autoshard.patterns._torch import make_local_tensor, rank_values
from autoshard.patterns.exchanging import exchange_ops, program_of, shift
from autoshard.specs.axes import MeshShape
from autoshard.specs.emitter import collectives

_REDUCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@dataclass(frozen=True, slots=True)
class PerRank:
    """One value on every rank, in the order of ranks."""

    values: tuple[torch.Tensor, ...]


class Lockstep:
    """Runs a local program on all ranks at once (an `Emitter`)."""

    def __init__(self, mesh: MeshShape, seed: int = 0) -> None:
        self.mesh = mesh
        self.home = torch.device("cpu")
        self._coordinates = list(mesh.coordinates())
        self._seed = seed
        self._streams = itertools.count()

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """Run an operator on every rank, or a functional collective among them."""
        if op == collectives.all_gather_into_tensor_coalesced.default:
            gather = collectives.all_gather_into_tensor.default
            return tuple(self._collective(gather, value, *args[1:]) for value in args[0])
        if op.namespace == "_c10d_functional" or op is shift:
            return self._collective(op, *args)
        program = program_of(op)
        if program is not None:
            return self._run_collective_op(program, args, kwargs)
        if op == exchange_ops.exchange.default:
            return self._exchange(*args)
        outputs = [
            op(*(_of_rank(value, rank) for value in args), **{name: _of_rank(kwargs[name], rank) for name in kwargs})
            for rank in range(self.mesh.size)
        ]
        if isinstance(outputs[0], (tuple, list)):
            return tuple(PerRank(values) for values in zip(*outputs, strict=True))
        return PerRank(tuple(outputs))

    def _run_collective_op(self, program: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a program with collectives inside once, on tensors that hold those of all ranks."""

        def collective(op: Any, value: torch.Tensor, *args: Any) -> torch.Tensor:
            return make_local_tensor(self._collective(op, PerRank(rank_values(value)), *args).values)

        merged = [make_local_tensor(value.values) if isinstance(value, PerRank) else value for value in args]
        outputs = program(*merged, **kwargs, collective=collective)
        if isinstance(outputs, tuple):
            return tuple(PerRank(rank_values(output)) for output in outputs)
        return PerRank(rank_values(outputs))

    def coordinate(self, axis: int) -> PerRank:
        """Every rank's coordinate on an axis."""
        return PerRank(tuple(torch.tensor(coordinate[axis]) for coordinate in self._coordinates))

    def host_coordinate(self, axis: int) -> PerRank:
        """The same: everything runs on the CPU."""
        return self.coordinate(axis)

    def group(self, axis: int) -> str:
        """Return the name of the axis in place of a process group."""
        return self.mesh.names[axis]

    def seed(self) -> PerRank:
        """The step's seed, equal on all ranks."""
        return PerRank((torch.tensor(self._seed),) * self.mesh.size)

    def stream(self) -> int:
        """The next number of a random operator."""
        return next(self._streams)

    def shape(self, value: PerRank) -> tuple[int, ...]:
        """Local shape of a value, equal on all ranks."""
        return tuple(value.values[0].shape)

    def dtype(self, value: PerRank) -> torch.dtype:
        """Element type of a value."""
        return value.values[0].dtype

    def device(self, value: PerRank) -> torch.device:
        """Device of a value."""
        return value.values[0].device

    def _line(self, rank: int, axis: int) -> list[int]:
        """The ranks that differ from `rank` only in the coordinate on `axis`, in its order."""
        here = self._coordinates[rank]
        return [
            other
            for other, coordinate in enumerate(self._coordinates)
            if coordinate[:axis] + coordinate[axis + 1 :] == here[:axis] + here[axis + 1 :]
        ]

    def _collective(self, op: Any, value: PerRank, *args: Any) -> PerRank:
        if op == collectives.wait_tensor.default:
            return value
        axis = self.mesh.index(args[-1])
        results = []
        for rank in range(self.mesh.size):
            line = self._line(rank, axis)
            tensors = [value.values[other] for other in line]
            results.append(_collective_result(op, tensors, line.index(rank), args))
        return PerRank(tuple(results))

    def _exchange(self, rows: PerRank, splits: PerRank, ranks: int, back: bool, group: str) -> PerRank:
        """Exchange rows by every rank's own counts (`exchanging.exchange_rows`)."""
        axis = self.mesh.index(group)
        sent = [split.view(2, ranks, -1).sum(2)[int(back)].tolist() for split in splits.values]
        pieces = [value.split(sizes) for value, sizes in zip(rows.values, sent, strict=True)]
        return PerRank(
            tuple(
                torch.cat([pieces[other][coordinate[axis]] for other in self._line(rank, axis)])
                for rank, coordinate in enumerate(self._coordinates)
            )
        )


def _of_rank(value: Any, rank: int) -> Any:
    if isinstance(value, PerRank):
        return value.values[rank]
    return [_of_rank(item, rank) for item in value] if isinstance(value, (tuple, list)) else value


def _collective_result(op: Any, tensors: Sequence[torch.Tensor], index: int, args: Sequence[Any]) -> torch.Tensor:
    """Return the result of a collective over the tensors of a line, on the rank at `index` of it."""
    if op == collectives.all_gather_into_tensor.default:
        return torch.cat(list(tensors))
    if op == collectives.all_reduce.default:
        return _reduce(tensors, args[0])
    if op == collectives.reduce_scatter_tensor.default:
        return _reduce(tensors, args[0]).chunk(len(tensors))[index]
    if op is shift:
        return tensors[(index - args[0]) % len(tensors)]
    assert op == collectives.all_to_all_single.default, op
    _, input_sizes, _ = args
    return torch.cat([tensor.split(list(input_sizes))[index] for tensor in tensors])


def _reduce(tensors: Sequence[torch.Tensor], reduction: str) -> torch.Tensor:
    total = reduce(_REDUCTIONS[reduction], tensors)
    return total / len(tensors) if reduction == "avg" else total
