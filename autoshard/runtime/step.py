"""A runnable local step: its halves, run on tensors of this rank."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx
from torch.distributed.device_mesh import DeviceMesh

from autoshard.capture.nodes import base_of
from autoshard.capture.output_history import OutputHistories
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.program.split import Halves
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime._torch import per_rank
from autoshard.runtime.call_order import CallOrder
from autoshard.runtime.gradient_sums import Accumulation, GradientSums, OpenSums
from autoshard.runtime.rank_agreement import Seeds, coordinates_on
from autoshard.runtime.shards import coordinate_of, local_of, written_out
from autoshard.size import Sizes, at, evaluate, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.tensors import pad_to

# 2**64 divided by the golden ratio: its multiples differ in many bits.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class Ranks:
    """Arguments of programs that differ between ranks: coordinates and groups of a device mesh.

    Args:
        device_mesh: the mesh.
        device: where the program runs.
        part: the index of the program among those that run side by side on other ranks, which draw other random
            numbers.
        seeds: the seeds of the mesh's steps, which all its programs may share.
    """

    def __init__(
        self, device_mesh: DeviceMesh, device: torch.device, part: int = 0, seeds: Seeds | None = None
    ) -> None:
        self.device_mesh = device_mesh
        self._part = part
        self._seeds = Seeds(device_mesh) if seeds is None else seeds
        self.mesh = MeshShape.of(device_mesh)
        self.device = device
        self.groups = tuple(device_mesh.get_group(axis).group_name for axis in range(self.mesh.ndim))
        self.coordinates = coordinates_on(device_mesh, device)
        self.host_coordinates = coordinates_on(device_mesh, torch.device("cpu"))
        self._no_seed = torch.zeros((), dtype=torch.int64, device="cpu")

    def seed(self, draws: bool) -> torch.Tensor:
        """Return the seed of one step, on the CPU; zero for a program that draws no random numbers."""
        if not draws:
            return self._no_seed
        return self._seeds.draw() ^ (self._part * _SEED_STRIDE % 2**62)

    def arguments(self, seed: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the arguments that follow a program's tensors, in the order of `GraphEmitter.add_rank_inputs`."""
        return (*self.coordinates, *self.host_coordinates, seed)


@dataclass(frozen=True, eq=False)
class RunnableStep:
    """A runnable local step.

    Attributes:
        step: the inputs and outputs.
        halves: the graphs.
        ranks: this rank's coordinates.
        general: makes the program in which every output has a gradient, for callers that differentiate more than the
            loss; None if this program is that one.
        later: a list to which a backward appends the function that computes gradients of parameters, if these are
            computed later; the halves then have parts.
        sums: the sums of gradients over several backwards before their reduction, if any.
        split: makes other halves of the step, given `compile` and `reduced` of `split_again`; None if there are no
            others.
        compiled: True if the halves are compiled.
        accumulation: the module's gradients accumulated in `autoshard.no_sync`; None if its programs run otherwise.
        order: the order of the module's calls, if any.
        histories: the autograd state of the outputs on one device; None if it is that of the program.
        between: makes the program of the gradients of outputs for other outputs; None if there is none.
    """

    step: LocalStep
    halves: Halves
    ranks: Ranks
    general: Callable[[], RunnableStep] | None = None
    later: list[Callable[[], None]] | None = None
    sums: GradientSums | None = None
    split: Callable[[bool, DeferredReduction | None], Halves] | None = None
    compiled: bool = False
    accumulation: Accumulation | None = None
    order: CallOrder | None = None
    histories: OutputHistories | None = None
    between: Callable[[], RunnableStep] | None = None

    def with_sums(self) -> RunnableStep:
        """Return the program whose backwards accumulate gradients in `autoshard.no_sync`; itself if it reduces none."""
        if self.halves.backward is None or self.split is None or self.accumulation is None:
            return self
        halves = self.split(self.compiled, "step")
        return self if halves.reduction is None else replace(self, halves=halves, sums=OpenSums(self.accumulation))

    def with_compiler(self) -> RunnableStep:
        """Return the program with compiled halves."""
        if self.compiled or self.split is None:
            return self
        return replace(self, halves=self.split(True, None), compiled=True)

    def local(self, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
        """Return the tensors for the program: local, and padded where a dim does not divide."""
        pairs = zip(tensors, self.step.inputs, strict=False)
        return [self._pad(local_of(tensor), at(border, sizes)) for tensor, border in pairs]

    @functools.cached_property
    def _may_pad(self) -> bool:
        """True if tensors of the program may be padded: most programs have none, and skip the check of each."""
        borders = (*self.step.inputs, *self.step.outputs)
        dynamic = any(is_dynamic(size) for border in borders for size in border.shape)
        return dynamic or any(border.is_padded(self.ranks.mesh) for border in borders)

    def _is_padded(self, border: ProgramTensor) -> bool:
        return self._may_pad and border.is_padded(self.ranks.mesh)

    def _pad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        if not self._is_padded(border):
            return tensor
        return _pad_local(tensor, border.local_shape(self.ranks.mesh))

    def forward(
        self, locals_: Sequence[torch.Tensor], sizes: Sizes, seed: torch.Tensor | None = None
    ) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the unpadded outputs and the saved tensors of the forward half."""
        seed = self.ranks.seed(self.halves.draws) if seed is None else seed
        numbers = _numbers(self.halves.forward_sizes, sizes)
        with _without_autocast():
            results = self.halves.forward(*locals_, *self.ranks.arguments(seed), *numbers)
        borders = self.step.forward_outputs
        outputs = [
            # Cloned, because the part without padding may be a view of another tensor of the program.
            self.unpad(result, border).clone() if self._is_padded(border) else result
            for result, border in zip(results, at(borders, sizes), strict=False)
        ]
        for place, copies in self._shared_outputs:
            outputs[place] = outputs[place].clone() if copies else outputs[place].detach()
        return outputs, results[len(borders) :]

    @functools.cached_property
    def _shared_outputs(self) -> list[tuple[int, bool]]:
        """The positions of outputs in memory of an input or an earlier output, and True for those to be copied.

        Simplification of the graph merges equal tensors. On one device these are separate: a change of one does not
        affect the others, unless it is a view. A parameter's tensor is not an output, because autograd would mark it.
        """
        if self.histories is None:
            return []
        memory, shared = self.histories.memory, []
        nodes = self.step.graph_module.graph.find_nodes(op="placeholder")
        first = {node: (border.kind, border.name) for node, border in zip(nodes, self.step.inputs, strict=False)}
        results: Any = self.step.graph_module.graph.output_node().args[0]
        for place, (node, border) in enumerate(zip(results, self.step.forward_outputs, strict=False)):
            if border.kind != "output":
                continue
            key = (border.kind, border.name)
            original = first.setdefault(base_of(node), key)
            if original is not key:
                shared.append((place, memory.get(original) != memory.get(key, -1)))
        return shared

    def unpad(self, tensor: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        if not self._is_padded(border):
            return tensor
        return _unpad_local(tensor, border, self.ranks.mesh, coordinate_of(self.ranks.device_mesh))

    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor]:
        """Return local gradients, in the order of the step; the list of saved tensors is emptied."""
        assert self.halves.backward is not None
        return run_graph(self.halves.backward, self.arguments(saved, tangents, sizes))

    def backward_of_inputs(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> tuple[dict[int, torch.Tensor], list[Any]]:
        """Return local gradients of inputs, by index among all gradients, and the arguments of the second part."""
        assert self.halves.parts is not None
        first, second = self.halves.parts
        arguments = self.arguments(saved, tangents, sizes)
        second_arguments = [arguments[place] for place in second.takes]
        first_arguments = [arguments[place] for place in first.takes]
        arguments.clear()
        results = run_graph(first.graph, first_arguments)
        return dict(zip(first.makes, results, strict=False)), [*second_arguments, *results[len(first.makes) :]]

    def arguments(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> list[torch.Tensor | int | float]:
        """Return the arguments of the backward half; the list of saved tensors is emptied."""
        padded = [
            torch.zeros(at(border, sizes).local_shape(self.ranks.mesh), dtype=border.dtype, device=self.ranks.device)
            if tangent is None
            else self._pad(written_out(tangent), at(border, sizes))
            for tangent, border in zip(tangents, self.step.tangents, strict=True)
        ]
        arguments = [*saved, *padded, *_numbers(self.halves.backward_sizes, sizes)]
        # Now only the arguments refer to saved tensors, so each is freed after its last use.
        saved.clear()
        return arguments


def run_graph(graph: fx.GraphModule, arguments: list[Any]) -> list[torch.Tensor]:
    """Return the results of a graph; the list is emptied, so that arguments are freed after their last use."""
    with _without_autocast():
        return list(graph(arguments))


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Return a context without autocast: the graph contains the casts made in the capture."""
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _numbers(expressions: Sequence[sympy.Expr], sizes: Sizes) -> list[int | float]:
    """Return the values of expressions for these sizes."""
    values = [evaluate(expression, sizes) for expression in expressions]
    return [int(value) if value.is_Integer else float(value) for value in values]


@per_rank
def _pad_local(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    return pad_to(tensor, shape)


@per_rank
def _unpad_local(
    tensor: torch.Tensor, border: ProgramTensor, mesh: MeshShape, coordinate: Sequence[int]
) -> torch.Tensor:
    sizes = true_local_shape(border.shape, border.spec, mesh, coordinate)
    return tensor[tuple(slice(size) for size in sizes)].contiguous()
