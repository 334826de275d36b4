"""Lower bounds of the seconds and bytes of a step on a mesh, over all plans, without a search."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autoshard.capture.joint import JointGraph
from autoshard.cluster.cost import CostModel, work_of_call
from autoshard.memory.optimizer import OptimizerMemory
from autoshard.patterns.graph_rules import GraphRules, Value, operand_nodes
from autoshard.patterns.rule import OpCall, Rule
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.program.aliasing import makes_view
from autoshard.search.shapes import Shape
from autoshard.specs.axes import MeshShape

aten = torch.ops.aten

_Kernel = tuple[float, float, torch.dtype, str]
"""FLOPs, bytes read and written, dtype, and name of an operator."""

# Graph operators that sum gradients. If two stages use a value, the runtime sums its gradients instead.
_SUMS = (aten.add.Tensor,)


class LeastWork:
    """Lower bounds of the seconds of a graph's step, from the work of its operators.

    Args:
        rules: the graph and its calls, on any mesh.
        cost: prices of the cluster, on any mesh.

    Attributes:
        shares: each forward operator's share of the total forward seconds on one device, in graph order.
    """

    def __init__(self, rules: GraphRules, cost: CostModel) -> None:
        self._cost = cost
        self._kernels: Counter[_Kernel] = Counter()
        self._in_stages: Counter[_Kernel] = Counter()
        forward = []
        for node in rules.operators:
            call, rule = rules.calls[node], rules.rules[node]
            # Views, free operators, and calls of `autoshard.shard` take no time.
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
        """Return a lower bound of the predicted seconds of a step on a mesh.

        The bound divides the work and bytes of every operator among all devices, duplicates nothing, and hides all
        communication. The busiest rank of a pipeline computes at least its share of all microbatches, and one
        microbatch passes all stages, forward and backward. Every kernel of a microbatch costs its launch.

        Args:
            shape: the mesh.
            microbatches: the possible numbers of microbatches of a pipeline; the best one is used.
        """
        if shape.axis is None:
            return self._step(self._kernels, shape.mesh.size, [self._cost])
        share, kinds = shape.devices_per_rank, self._kinds(shape.mesh.size)
        # The busiest rank has its share of all microbatches, but at least one microbatch through all stages.
        return min(
            self._step(self._in_stages, share * number, kinds) * max(number / shape.ranks, 1.0)
            for number in microbatches
        )

    def _kinds(self, devices: int) -> list[CostModel]:
        """Return the cost models of all kinds of device among the first `devices`."""
        cluster = self._cost.cluster
        if cluster.is_uniform:
            return [self._cost]
        first = {cluster.device_of(rank): rank for rank in reversed(range(devices))}
        return [CostModel(cluster.of_ranks([rank]), MeshShape.of({"device": 1})) for rank in first.values()]

    def _step(self, kernels: Counter[_Kernel], parts: int, kinds: Sequence[CostModel]) -> float:
        """Return the seconds of one of `parts` equal parts of all kernels, each on its fastest kind of device."""
        return sum(
            count * min(cost.compute(work / parts, moved / parts, dtype, name) for cost in kinds)
            for (work, moved, dtype, name), count in kernels.items()
        )


def _kernel(node: fx.Node, call: OpCall, variants: Sequence[Rule]) -> _Kernel:
    """Return the kernel of a call, with the fewest bytes of all implementations."""
    results = [meta for meta in call.results if meta is not None]
    work = work_of_call(call.op, call.operands, results, call.args)
    moved = sum(meta.bytes for meta in results)
    # A slice reads only its result. Other operators read each of their tensors once in any implementation.
    if call.op is not aten.index_select.default:
        moved += min(_read_bytes(node, call, rule) for rule in variants)
    # In a pipeline, logits are whole and computed once.
    return work.flops - work.repeated, moved, work.dtype, work.operator


def _read_bytes(node: fx.Node, call: OpCall, rule: Rule) -> int:
    """Return the total bytes of the tensors that an implementation reads, each counted once."""
    operands = zip(operand_nodes(node), rule.operands, call.operands, strict=True)
    return sum({source: meta.bytes for source, dims, meta in operands if dims is not None}.values())


def tighten_bound(least: float, candidate: CandidatePlan, links: int, contention: float) -> float:
    """Return a lower bound of a step's seconds on a mesh, tightened by the solver's bound.

    Args:
        least: lower bound of the seconds of compute.
        candidate: a plan with the solver's bound.
        links: the number of kinds of links, which can send at the same time.
        contention: the contention of the cluster.
    """
    # A step takes its compute, its exposed communication, and `contention` times its overlapped communication: beyond
    # compute, at least `contention` times the traffic of the busiest kind of link. Compute and communication together
    # take at least the solver's bound.
    share = min(1.0, contention) / links
    return max(least, share * candidate.lower_bound + (1.0 - share) * least)


def least_bytes(graph: JointGraph, shape: Shape, optimizer: OptimizerMemory) -> int:
    """Return a lower bound of the peak of the device with the most memory.

    At the optimizer's step, a device holds its part of parameters, gradients and optimizer state; without a pipeline,
    also of buffers and inputs. A part is at least the whole divided by the number of devices.

    Args:
        graph: the captured step.
        shape: the mesh.
        optimizer: the memory of the optimizer.
    """
    held, step = resident_bytes(graph, shape.devices_per_rank, optimizer, parameters_only=shape.axis is not None)
    return held // shape.ranks + (step if shape.axis is None else 0)


def resident_bytes(
    graph: JointGraph, parts: int, optimizer: OptimizerMemory, *, parameters_only: bool
) -> tuple[int, int]:
    """Return the bytes of one equal part: of inputs, gradients and optimizer state, and of the optimizer's step.

    Args:
        graph: the captured step.
        parts: the number of devices among which every tensor is divided.
        optimizer: the memory of the optimizer.
        parameters_only: True to exclude buffers and inputs of the model.
    """
    trained = {output.name: output.node for output in graph.outputs if output.kind == "gradient" and output.node}
    held, updated = 0, []
    for source in graph.inputs:
        if source.kind == "tangent" or (parameters_only and source.kind != "parameter"):
            continue
        meta = Value(source.node).meta
        # Rounded up, because some device has the larger part.
        elements = -(-math.prod(meta.shape) // parts)
        part = elements * meta.dtype.itemsize
        held += part
        gradient = trained.get(source.name)
        if source.kind == "parameter" and gradient is not None:
            held += elements * gradient.meta["val"].element_size()
            held += optimizer.state_bytes(meta.shape, (elements,), meta.dtype.itemsize)
            updated.append(part)
    return held, optimizer.step_bytes(updated)
