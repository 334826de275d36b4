"""Standard layouts of a model on a mesh, as hints that force them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.marks import Primitive, replicate, split
from autoshard.errors import HintError
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.layouts.tensor_parallel import Shards, TensorParallel, TensorParallelSearch
from autoshard.planner.task_graph_restrictions import sequence_inputs
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import shard_placement

Hints = Mapping[str, Any]
ModelParallel = Literal["", "TP", "TP+SP", "EP"]


@dataclass(frozen=True, slots=True)
class StandardLayout:
    """A standard layout on the axes of a mesh.

    Attributes:
        name: such as `"FSDP2 x TP"`.
        hints: force it: placements of all parameters, and primitives for modules.
        replicated: the axes over which parameters are replicated, and the batch is split.
        sharded: the axes over which parameters are sharded at rest, and the batch is split.
        model_axis: the axis of tensor or expert parallelism; None without it.
        model_parallel: the kind of the parallelism on that axis; empty without it.
        regathers: True if gathered parameters are freed after the forward half, and gathered again.
        tensor_parallel: the layers that tensor parallelism splits.
    """

    name: str
    hints: Hints = field(repr=False)
    replicated: tuple[str, ...] = ()
    sharded: tuple[str, ...] = ()
    model_axis: str | None = None
    model_parallel: ModelParallel = ""
    regathers: bool = True
    tensor_parallel: TensorParallel = field(default_factory=TensorParallel, repr=False)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A kind of layout: parameters over the axes of data parallelism, and the kind of model parallelism.

    Attributes:
        data: `"DDP"`, `"FSDP2"`, `"FSDP2 whole"` or `"HSDP"`; empty if there are no axes of data parallelism.
        model: as in `StandardLayout`.
    """

    data: str
    model: ModelParallel = ""

    @property
    def name(self) -> str:
        return " x ".join(filter(None, (self.data, self.model)))


_DATA = ("DDP", "FSDP2", "FSDP2 whole", "HSDP")
_KINDS: tuple[_Kind, ...] = (
    *(_Kind(data) for data in _DATA),
    *(_Kind(data, model) for model in ("TP", "TP+SP") for data in ("", "DDP", "FSDP2", "HSDP")),
    *(_Kind(data, "EP") for data in ("DDP", "FSDP2")),
)
NAMES = tuple(kind.name for kind in _KINDS)
"""Names of all standard layouts."""


# Largest fraction of parameters that a sharded layout may replicate: norms and biases of odd sizes are less.
_MOST_WHOLE = 0.1


class StandardLayouts:
    """The standard layouts of a step on a mesh.

    Data parallelism is over all axes; tensor parallelism is over the last axis, with data parallelism over the others.
    Expert parallelism is over the last axis too, over which the other parts of the model split the batch. HSDP
    replicates over the first axis of data parallelism, and shards over the others.

    Args:
        rules: the graph and its rules.
        mesh: the mesh axes.
    """

    def __init__(self, rules: GraphRules, mesh: MeshShape) -> None:
        self.rules = rules
        self.mesh = mesh
        self.axes = tuple(axis.name for axis in mesh.axes if axis.size > 1)
        self.shapes = {source.name: Value(source.node).meta.shape for source in rules.graph.parameters}
        self._found: dict[str, TensorParallel | Shards | HintError] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layouts for which the mesh has axes, and the model experts; some may not fit the model."""
        has_experts = bool(self.axes) and self._search.has_experts
        return tuple(kind.name for kind in _KINDS if self._has(kind) and (kind.model != "EP" or has_experts))

    def make(self, name: str) -> StandardLayout:
        """Return a layout.

        Raises:
            HintError: the model or the sizes of the mesh do not allow it; the message is the reason.
        """
        kind = next(kind for kind in _KINDS if kind.name == name)
        if not self._has(kind):
            raise HintError(f"it needs more axes than the mesh {self.mesh} has with several devices.")
        data = self._data_axes(kind)
        replicated = {"DDP": data, "HSDP": data[:1]}.get(kind.data, ())
        sharded = tuple(axis for axis in data if axis not in replicated)
        self._check_batch(data)
        if kind.model == "TP+SP" and not sequence_inputs(self.rules):
            raise HintError("no input has a sequence behind its batch.")
        axis = self.axes[-1] if kind.model else None
        tensor_parallel, shards = TensorParallel(), Shards()
        if kind.model == "EP":
            shards = self._once(kind.model, self._search.expert_parallel)
        elif kind.model:
            tensor_parallel = self._once("TP", self._search.tensor_parallel)
            shards = tensor_parallel.shards
        hints: dict[str, Any] = {
            parameter: self._placements(parameter, sharded, axis, shards.get(parameter)) for parameter in self.shapes
        }
        self._check_shards(sharded, hints)
        hints |= self._primitives(kind, data, shards)
        regathers = bool(sharded) and kind.data != "FSDP2 whole"
        return StandardLayout(name, hints, replicated, sharded, axis, kind.model, regathers, tensor_parallel)

    def _has(self, kind: _Kind) -> bool:
        data = self._data_axes(kind)
        return bool(self.axes) and bool(data) == bool(kind.data) and (kind.data != "HSDP" or len(data) > 1)

    def _data_axes(self, kind: _Kind) -> tuple[str, ...]:
        return self.axes[:-1] if kind.model in ("TP", "TP+SP") else self.axes

    @cached_property
    def _search(self) -> TensorParallelSearch:
        return TensorParallelSearch(self.rules, self.axes[-1], self._size(self.axes[-1:]))

    def _size(self, axes: Sequence[str]) -> int:
        return math.prod(self.mesh.sizes[self.mesh.index(axis)] for axis in axes)

    def _once(self, key: str, find: Callable[[], Any]) -> Any:
        """Return a cached result, or reraise its error; several layouts have the same shards."""
        if key not in self._found:
            try:
                self._found[key] = find()
            except HintError as error:
                self._found[key] = error
        found = self._found[key]
        if isinstance(found, HintError):
            raise found
        return found

    def _check_batch(self, data: tuple[str, ...]) -> None:
        """Raise a `HintError` unless the ranks of data parallelism get equal numbers of samples."""
        if not data:
            return
        inputs, ranks = self.rules.batch_inputs(), self._size(data)
        if not inputs:
            raise HintError("no input has a batch that data parallelism could split.")
        samples = Value(inputs[0]).meta.shape[0]
        if samples % ranks:
            axes = ", ".join(f"{axis}={self._size((axis,))}" for axis in data)
            raise HintError(f"{axes} does not divide the batch of {samples}.")

    def _check_shards(self, axes: tuple[str, ...], placements: Mapping[str, Mapping[str, Placement]]) -> None:
        """Raise a `HintError` if many parameters would be replicated, since the axes divide none of their dims."""
        whole = total = 0
        for parameter, shape in self.shapes.items():
            size = math.prod(shape)
            total += size
            whole += size * all(placements[parameter][axis].is_replicate() for axis in axes)
        if axes and whole > _MOST_WHOLE * total:
            names = ", ".join(f"{axis}={self._size((axis,))}" for axis in axes)
            raise HintError(
                f"{names} divides no dim of {whole / total:.0%} of the parameters: FSDP2 pads them, and a plan would "
                "keep them whole."
            )

    def _primitives(self, kind: _Kind, data: tuple[str, ...], shards: Shards) -> dict[str, tuple[Primitive, ...]]:
        whole = (replicate(data),) if data else ()
        if kind.model == "EP":
            # Experts process the tokens of all ranks; the rest of the model splits the batch over their axis, too.
            experts = split(self.axes[-1], rest="batch")
            others = (replicate(data[:-1]), experts) if len(data) > 1 else (experts,)
            return {"": whole} | {name.rpartition(".")[0]: others for name in shards}
        if kind.model:
            return {"": (*whole, split(self.axes[-1], rest="sequence" if kind.model == "TP+SP" else "whole"))}
        return {"": whole}

    def _placements(
        self, parameter: str, sharded: tuple[str, ...], axis: str | None, shard: tuple[int, int] | None
    ) -> dict[str, Placement]:
        """Return the placement of a parameter on every axis.

        Args:
            parameter: its name.
            sharded: the axes over which parameters are sharded at rest.
            axis: the axis of tensor or expert parallelism.
            shard: the dim and the split factor on that axis; None if the parameter is not sharded there.
        """
        placements: dict[str, Placement] = dict.fromkeys(self.mesh.names, Replicate())
        storage = sharded
        if axis is not None and shard is not None:
            placements[axis] = shard_placement(*shard)
            storage = tuple(name for name in sharded if name != axis)
        ranks, taken = self._size(storage), None if shard is None else shard[0]
        # FSDP2 pads dim 0 if it is not divisible; a divisible dim has the same bytes without padding.
        dims = [dim for dim, size in enumerate(self.shapes[parameter]) if dim != taken and size % ranks == 0]
        if storage and dims:
            placements |= dict.fromkeys(storage, Shard(dims[0]))
        return placements
