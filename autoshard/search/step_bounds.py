"""What a step takes and holds at least on a number of devices, whatever the plan: bounds that need no search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autoshard.capture.joint import JointGraph
from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.graph_rules import GraphRules, Value, operand_nodes
from autoshard.patterns.rule import OpCall, Rule
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.program.aliasing import makes_view
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten

_Kernel = tuple[float, float, torch.dtype, str]
"""Operations, bytes read and written, dtype, name."""

_SUMS = (aten.add.Tensor,)
"""Gradients of what two stages use are summed by the runtime, where one graph has an operator for it."""


class LeastWork:
    """The least seconds that steps of one graph take, by what its operators must compute.

    Args:
        rules: the graph and its calls, on any mesh.
        cost: prices of the cluster, on any mesh.

    Attributes:
        shares: of the seconds of all forward operators on one device, what each takes, in their order.
    """

    def __init__(self, rules: GraphRules, cost: CostModel) -> None:
        self._cost = cost
        self._kernels: Counter[_Kernel] = Counter()
        self._in_stages: Counter[_Kernel] = Counter()
        forward = []
        for node in rules.operators:
            call, rule = rules.calls[node], rules.rules[node]
            if rule.free or makes_view(call.op) or rules.graph.pin(node) is not None:
                continue
            kernel = _kernel(node, call, (rule, *rule.variants))
            self._kernels[kernel] += 1
            if rules.graph.phase(node) == "forward":
                forward.append(cost.compute(*kernel))
            if call.op not in _SUMS or rules.graph.phase(node) == "forward":
                self._in_stages[kernel] += 1
        self.shares = tuple(seconds / sum(forward) for seconds in forward) if any(forward) else ()

    def seconds(self, shape: Shape, microbatches: Iterable[int] = (1,)) -> float:
        """No step on a mesh of this shape is predicted to take less.

        Every operator's work and bytes are shared by all devices, none is done twice, and all communication is hidden.
        Of a pipeline the busiest rank computes its share of all microbatches at least; and one microbatch goes through
        all stages, forward and backward. Kernels of small microbatches are short, and each costs its launch.

        Args:
            shape: the mesh.
            microbatches: numbers of them that a pipeline may have; it takes the best.
        """
        if shape.axis is None:
            return self._step(self._kernels, shape.mesh.size, [self._cost])
        share, kinds = shape.devices_per_rank, self._kinds(shape.mesh.size)
        return min(
            self._step(self._in_stages, share * number, kinds) * max(number / shape.ranks, 1.0)
            for number in microbatches
        )

    def _kinds(self, devices: int) -> list[CostModel]:
        """Prices of every kind among the first devices: a stage of a pipeline is priced for those that it has."""
        cluster = self._cost.cluster
        if cluster.is_uniform:
            return [self._cost]
        first = {cluster.device_of(rank): rank for rank in reversed(range(devices))}
        return [CostModel(cluster.of_ranks([rank]), MeshShape.of({"device": 1})) for rank in first.values()]

    def _step(self, kernels: Counter[_Kernel], parts: int, kinds: Sequence[CostModel]) -> float:
        """Seconds in which the devices fastest at each kernel do one of so many equal parts of everything."""
        return sum(
            count * min(cost.compute(work / parts, moved / parts, dtype, name) for cost in kinds)
            for (work, moved, dtype, name), count in kernels.items()
        )


def _kernel(node: fx.Node, call: OpCall, variants: Sequence[Rule]) -> _Kernel:
    """Operations and bytes of one call, dtype and name: of its leanest implementation."""
    results = [meta for meta in call.results if meta is not None]
    work = flops(call.op, [meta.shape for meta in call.operands], [meta.shape for meta in results], call.args)
    moved = sum(meta.bytes for meta in results)
    if call.op is not aten.index_select.default:  # a slice reads what it keeps
        moved += min(_read_bytes(node, call, rule) for rule in variants)
    return work, moved, results[0].dtype if results else torch.float32, call.op.overloadpacket.__name__


def _read_bytes(node: fx.Node, call: OpCall, rule: Rule) -> int:
    """Bytes of the tensors that an implementation reads, each once."""
    operands = zip(operand_nodes(node), rule.operands, call.operands, strict=True)
    return sum({source: meta.bytes for source, dims, meta in operands if dims is not None}.values())


def tighten_bound(least: float, found: CandidatePlan, links: int, contention: float) -> float:
    """No step on a mesh takes less, by what was proved of one plan for it.

    A step takes what it computes, what it sends without computing, and `contention` times what it sends while it
    computes: at least `contention` of all that the busiest of its links sends. All plans compute `least` seconds at
    least, and compute and send the solver's bound in all.

    Args:
        least: seconds that every plan computes.
        found: a plan with the solver's bound.
        links: kinds of links that there are, which send at the same time.
        contention: of the cluster.
    """
    share = min(1.0, contention) / links
    return max(least, share * found.lower_bound + (1.0 - share) * least)


def least_bytes(graph: JointGraph, shape: Shape, optimizer: OptimizerMemory) -> int:
    """No plan on a mesh of this shape has a smaller peak on the device that holds most.

    When the optimizer steps, a device holds its part of parameters, gradients and state, and without a pipeline of
    buffers and inputs too. No part is less than the whole divided by the devices.

    Args:
        graph: the captured step.
        shape: the mesh.
        optimizer: what it holds.
    """
    trained = {output.name: output.node for output in graph.outputs if output.kind == "gradient" and output.node}
    held, updated = 0, []
    for source in graph.inputs:
        if source.kind == "tangent" or (shape.axis is not None and source.kind != "parameter"):
            continue
        meta = Value(source.node).meta
        elements = -(-math.prod(meta.shape) // shape.devices_per_rank)
        own = elements * meta.dtype.itemsize
        held += own
        gradient = trained.get(source.name)
        if source.kind == "parameter" and gradient is not None:
            held += elements * gradient.meta["val"].element_size()
            held += optimizer.state_bytes(meta.shape, (elements,), meta.dtype.itemsize)
            updated.append(own)
    step = optimizer.step_bytes(updated) if shape.axis is None else 0
    return held // shape.ranks + step
