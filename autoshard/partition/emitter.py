"""Recording a rank's program: local operators become nodes of an FX graph, with the shapes of local tensors."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autoshard.partition._torch import FakeTensorMode
from autoshard.specs.axes import MeshShape


class GraphEmitter:
    """An `Emitter` whose values are FX nodes. Shapes are found by running every operator on fake tensors.

    Args:
        mesh: the mesh axes.
        groups: for every axis, the name of the process group of this rank's line along it.
        mode: the fake mode that the captured graph's tensors belong to.
        device: of the program's tensors.
    """

    def __init__(self, mesh: MeshShape, groups: Sequence[str], mode: FakeTensorMode, device: torch.device) -> None:
        self.mesh = mesh
        self.graph = fx.Graph()
        self.phase = "forward"
        self._groups = tuple(groups)
        self._mode = mode
        self._device = device
        self._streams = 0
        self._coordinates: list[fx.Node] = []
        self._seed: fx.Node | None = None

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        """An input of the program, with its local shape."""
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        return node

    def ranks(self) -> None:
        """Take the rank's coordinates and the step's seed as the next inputs of the program."""
        self._coordinates = [self.placeholder(f"coordinate_{name}", (), torch.int64) for name in self.mesh.names]
        self._seed = self.placeholder("seed", (), torch.int64)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        node = self.graph.call_function(op, args, kwargs)
        fakes = fx.map_arg((args, kwargs), lambda operand: operand.meta["val"])
        with self._mode, torch.no_grad():
            val = op(*fakes[0], **fakes[1])
        self._finish(node, val)
        if isinstance(val, (tuple, list)):
            return tuple(self._item(node, index, item) for index, item in enumerate(val))
        return node

    def _item(self, node: fx.Node, index: int, val: Any) -> fx.Node | None:
        if val is None:
            return None
        item = self.graph.call_function(operator.getitem, (node, index))
        self._finish(item, val)
        return item

    def _finish(self, node: fx.Node, val: Any) -> None:
        node.meta["val"] = val
        node.meta["partitioner_tag"] = f"is_{self.phase}"

    def coordinate(self, axis: int) -> fx.Node:
        return self._coordinates[axis]

    def group(self, axis: int) -> str:
        return self._groups[axis]

    def seed(self) -> fx.Node:
        assert self._seed is not None, "ranks() comes before the first operator"
        return self._seed

    def stream(self) -> int:
        self._streams += 1
        return self._streams

    def shape(self, value: fx.Node) -> tuple[int, ...]:
        return tuple(value.meta["val"].shape)

    def dtype(self, value: fx.Node) -> torch.dtype:
        dtype: torch.dtype = value.meta["val"].dtype
        return dtype

    def device(self, value: fx.Node) -> torch.device:
        device: torch.device = value.meta["val"].device
        return device

    def is_contiguous(self, value: fx.Node) -> bool:
        """Whether the value lies row-major in memory, by the strides of the fake tensor."""
        return bool(value.meta["val"].is_contiguous())
