"""Training steps of the local program of a plan on all ranks of a mesh, in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from autoshard import MeshShape
from autoshard.capture.capture_device import DEVICE
from autoshard.patterns.lockstep import Lockstep, PerRank
from autoshard.program.build_program import PlannedGraph, build_program
from autoshard.program.localize import ProgramTensor
from autoshard.program.program_replay import COLLECTIVE_KINDS
from autoshard.size import Sizes, at, evaluate
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard
from autoshard.tools.verify.graph_walk import run_graph


@dataclass(frozen=True, slots=True)
class HeldTensor:
    """A tensor as the ranks hold it: padded local tensors, and what they are of the whole."""

    value: PerRank
    border: ProgramTensor


class TrainingOnAllRanks:
    """A module that trains on all ranks: every rank holds its shards, and runs the two halves of its program.

    Args:
        planned: the captured step and the decisions for it.
        tensors: the whole parameters and buffers, by kind and name.

    Raises:
        RuleError: an operator cannot run on the shards that were planned.
    """

    def __init__(self, planned: PlannedGraph, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        self.mesh: MeshShape = planned.flow.mesh
        self.sizes: Sizes = {} if planned.graph.dynamic is None else planned.graph.dynamic.example
        # The axes stand for the process groups along them.
        self.step, self.halves = build_program(
            planned, self.mesh.names, DEVICE, compile=False, in_parts=False, reduced=None
        )
        self._emit = Lockstep(self.mesh)
        self._held: dict[str, PerRank] = {}
        for source, border in zip(planned.flow.graph.inputs, self.step.inputs, strict=True):
            if source.kind in ("parameter", "buffer"):
                self._held[source.name] = self.scatter(tensors[source.kind, source.name], border.spec)
            elif source.kind == "constant":
                assert source.value is not None, f"{source.name} has no numbers"
                self._held[source.name] = self.scatter(source.value, border.spec)

    def scatter(self, whole: Tensor, spec: Spec) -> PerRank:
        """Return the shards of all ranks, padded with zeros, as programs may count on."""
        whole = whole.detach()
        return PerRank(tuple(shard(whole, spec, self.mesh, place, padded=True) for place in self.mesh.coordinates()))

    def run(
        self, inputs: Mapping[str, Tensor], tangents: Mapping[str, Tensor], learning_rate: float
    ) -> tuple[dict[str, HeldTensor], dict[str, HeldTensor]]:
        """Run a step: forward, backward, and the update of parameters and buffers.

        Args:
            inputs: the whole inputs, by name.
            tangents: the whole gradients of the outputs that have some, by name.
            learning_rate: of stochastic gradient descent.

        Returns:
            The outputs and the gradients by name.
        """
        arguments = [
            self.scatter(inputs[border.name], border.spec) if border.kind == "input" else self._held[border.name]
            for border in self.borders("input")
        ]
        forward = self._run(
            self.halves.forward, [*arguments, *self._rank_arguments(), *self._numbers(self.halves.forward_sizes)]
        )
        count = len(self.step.forward_outputs)
        outputs, saved = forward[:count], forward[count:]
        gradients: list[HeldTensor] = []
        if self.halves.backward is not None:
            derivatives = [self.scatter(tangents[border.name], border.spec) for border in self.borders("tangent")]
            numbers = self._numbers(self.halves.backward_sizes)
            slopes = self._run(self.halves.backward, [*saved, *derivatives, *numbers])
            gradients = [HeldTensor(*pair) for pair in zip(slopes, self.borders("gradient"), strict=True)]
        for gradient in gradients:
            if gradient.border.name in self._held:
                pairs = zip(self._held[gradient.border.name].values, gradient.value.values, strict=True)
                # A gradient lies as its parameter does.
                self._keep(gradient.border, PerRank(tuple(value - learning_rate * slope for value, slope in pairs)))
        results = [HeldTensor(*pair) for pair in zip(outputs, at(self.step.forward_outputs, self.sizes), strict=True)]
        for result in results:
            if result.border.kind == "mutation" and result.border.name in self._held:
                self._keep(result.border, result.value)
        returned = [result for result in results if result.border.kind == "output"]
        return _by_name(returned), _by_name(gradients)

    @property
    def collectives(self) -> int:
        """The number of collectives that one step runs."""
        halves = (self.halves.forward, self.halves.backward)
        nodes = (node for half in halves if half is not None for node in half.graph.nodes)
        return sum(node.target in COLLECTIVE_KINDS for node in nodes)

    def borders(self, kind: str) -> tuple[ProgramTensor, ...]:
        """Return the tensors at the border of the program: of kind "tangent", "gradient", "output", or "input": all
        that enters the forward half.
        """
        if kind == "input":
            borders = tuple(border for border in self.step.inputs if border.kind != "tangent")
        else:
            borders = tuple(border for border in (*self.step.inputs, *self.step.outputs) if border.kind == kind)
        return at(borders, self.sizes)

    def tensors(self, kind: str) -> dict[str, HeldTensor]:
        """Return the parameters or the buffers, by name."""
        borders = [border for border in self.borders("input") if border.kind == kind]
        return _by_name([HeldTensor(self._held[border.name], border) for border in borders])

    def beside(self, held: HeldTensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what every rank holds without padding, beside the same part of a whole reference."""
        value, border, places = held.value, held.border, list(self.mesh.coordinates())
        if border.spec.partial_axes or tuple(reference.shape) != tuple(border.shape):
            shards = dict(zip(places, value.values, strict=True))
            yield unshard(shards, border.spec, self.mesh, border.shape), reference
            return
        expected = self.scatter(reference, border.spec).values
        if not border.is_padded(self.mesh):
            yield from zip(value.values, expected, strict=True)
            return
        for local, part, real in zip(value.values, expected, self._elements(border), strict=True):
            yield local[real], part[real]

    def _keep(self, border: ProgramTensor, value: PerRank) -> None:
        """Keep a parameter or buffer for the next step, with zeros as padding."""
        if border.is_padded(self.mesh):
            pairs = zip(value.values, self._elements(border), strict=True)
            value = PerRank(tuple(torch.where(real, local, torch.zeros_like(local)) for local, real in pairs))
        self._held[border.name] = value

    def _elements(self, border: ProgramTensor) -> list[Tensor]:
        """Return, for every rank, where its padded local tensor holds elements."""
        everything = torch.ones(border.shape, dtype=torch.bool)
        return [shard(everything, border.spec, self.mesh, place, padded=True) for place in self.mesh.coordinates()]

    def _run(self, half: fx.GraphModule, arguments: list[Any]) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(
                run_graph(half, arguments, lambda node, args, kwargs: self._emit.call(node.target, *args, **kwargs))
            )

    def _rank_arguments(self) -> tuple[PerRank, ...]:
        """Return the arguments in the order of `GraphEmitter.add_rank_inputs`."""
        coordinates = tuple(self._emit.coordinate(axis) for axis in range(self.mesh.ndim))
        return (*coordinates, *coordinates, self._emit.seed())

    def _numbers(self, expressions: Sequence[sympy.Expr]) -> list[int | float]:
        values = [evaluate(expression, self.sizes) for expression in expressions]
        return [int(value) if value.is_Integer else float(value) for value in values]


def _by_name(tensors: Sequence[HeldTensor]) -> dict[str, HeldTensor]:
    return {tensor.border.name: tensor for tensor in tensors}
