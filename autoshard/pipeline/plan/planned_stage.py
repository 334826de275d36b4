"""What a planned stage costs in a pipeline: `StageCosts` from the program that its plan stands for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Placement

from autoshard.capture.joint import JointGraph
from autoshard.capture.recomputation import recompute_layers
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.memory.footprint import Allocation, peak
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.planner.allocations import allocations
from autoshard.planner.planner import Planner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.aliasing import storage_root
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import operations
from autoshard.reshard.deferred_reductions import reduce_with_sums
from autoshard.simulate.events import replay
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec

_AT_REST = ("parameter", "optimizer", "buffer")


@dataclass(frozen=True, slots=True)
class Links:
    """What joins the ranks of a pipeline, and what a message over it costs.

    Attributes:
        cost: prices on the whole mesh.
        axis: the pipeline's, by position.
    """

    cost: CostModel
    axis: int

    @staticmethod
    def of(cluster: Cluster, mesh: MeshShape, axis: str) -> Links:
        """The links along an axis of a mesh on a cluster."""
        return Links(CostModel(cluster, mesh), mesh.index(axis))

    @property
    def bandwidth(self) -> float:
        """Bytes per second of one device to its next."""
        return self.cost.axis_link(self.axis).bandwidth

    def send(self, bytes: int) -> float:
        """Seconds of a message to the next rank, at the slowest link of the axis: all devices of a stage send one."""
        return self.cost.collective("shift", bytes, self.axis) if bytes else 0.0

    def sum(self, bytes: int, ranks: int) -> float:
        """Seconds of a sum of gradients of `bytes` over some of the ranks: an all-reduce round a ring of them."""
        if ranks < 2 or not bytes:
            return 0.0
        latency = self.cost.axis_link(self.axis).latency
        return 2 * (ranks - 1) * latency + bytes * self.sum_per_byte(ranks)

    def sum_per_byte(self, ranks: int) -> float:
        """What every byte of such gradients adds to that, in seconds."""
        return 2 * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStage:
    """A stage with its plan.

    Attributes:
        stage: its module, and what it takes and gives.
        graph: its captured step with one microbatch.
        planner: the planner of that graph.
        plan: what was decided.
    """

    stage: StageModule
    graph: JointGraph
    planner: Planner
    plan: ShardingPlan

    @property
    def received(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Names of the inputs that the stage before sends, each with a tensor like it."""
        names = [leaf for leaf in self.graph.call.leaves if isinstance(leaf, str)]
        return tuple((name, value.like) for name, value in zip(names, self.stage.received, strict=False))

    @property
    def passed(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Names of the outputs that go to the next stage, each with a tensor like it."""
        names = [output.name for output in self.graph.outputs if output.kind == "output"]
        return tuple((name, value.like) for name, value in zip(names, self.stage.passed, strict=False))

    @property
    def modules(self) -> tuple[str, str]:
        """Paths of the first and the last module that it runs operators of, of those with parameters if there are."""
        forward = [node for node in self.graph.graph.nodes if self.graph.phase(node) == "forward"]
        paths = [self.graph.module_path(node) for node in forward if node.op == "call_function"]
        held = {name.rpartition(".")[0] for name, _ in self.stage.module.named_parameters(remove_duplicate=False)}
        named = [path for path in paths if path in held] or [path for path in paths if path] or [""]
        return named[0], named[-1]


def stage_costs(planned: PlannedStage, links: Links, microbatches: int, ranks_of: Iterable[int] = ()) -> StageCosts:
    """What a planned stage costs.

    Seconds are those of the two halves of its program, each replayed on its own: whatever they communicate is in them.
    Gradients that are added up over the microbatches are reduced by the last backward, which is replayed likewise: what
    it takes longer than the others counts once per step. Where a schedule splits backward, the half for inputs runs
    what the gradients of what the stage received need, and the half for weights the rest: all of it on the first stage.
    Their seconds are those of the whole backward, shared out by what the operations of each take one by one.

    Bytes are those of the program's account: what both halves need is saved, and with it what the stage returns, which
    the schedule keeps; parameters, gradients, optimizer state, buffers, and the stage's part of the model's inputs for
    all microbatches are there all the time. Gradients have the size in which they are added up; from the second
    microbatch on, new ones are held beside the sums of those before, until they are added.

    Args:
        planned: the stage.
        links: along the pipeline.
        microbatches: of one step.
        ranks_of: pipeline ranks of all stages that share parameters with this one, by their stages.

    Returns:
        The costs. The optimizer's update takes no time here, as in `ShardingPlan.step_seconds`.
    """
    placement = tuple(ranks_of)
    flow, planner = _flow(planned)
    reduced = planner.settings.reduced if microbatches > 1 else None
    program = planner.program(flow, reduced)
    forward, backward = (_seconds(planner, half) for half in (program.forward.graph, program.backward.graph))
    held = _stage_memory(planned, planner, flow, program, microbatches)
    halves = _BackwardHalves.of(planner, program, {name for name, like in planned.received if like.requires_grad})
    sent = _local_bytes(planned.passed, planned.plan.output_placements, planned.plan.mesh)
    trained = [one for one in planned.received if one[1].requires_grad]
    arriving = planned.plan.input_placements if planned.plan.options.get("inputs") == "local" else {}  # else whole
    returned = _local_bytes(trained, arriving, planned.plan.mesh)
    return StageCosts(
        forward_seconds=forward,
        input_backward_seconds=backward * halves.share,
        weight_backward_seconds=backward * (1 - halves.share),
        forward_bytes=sent,
        forward_send_seconds=links.send(sent),
        backward_bytes=returned,
        backward_send_seconds=links.send(returned),
        rest_bytes=held.rest,
        saved_bytes=held.saved,
        weight_saved_bytes=halves.kept,
        working_bytes=held.working,
        application_bytes=held.application,
        reduction_seconds=_reduction_seconds(planner, program, backward)
        + _tied_gradient_seconds(planned, links, placement),
    )


def _flow(planned: PlannedStage) -> tuple[Flow, Planner]:
    """The decisions of a plan on the graph that they were made for, which may run layers again."""
    planner, plan = planned.planner, planned.plan
    if plan.recomputed:
        graph = recompute_layers(planned.graph, plan.recomputed)
        planner = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    return Flow(planner.rules, Decisions.from_data(plan.decisions), planner.mesh), planner


def _seconds(planner: Planner, half: fx.Graph) -> float:
    """Of one half of a program, what communication takes from the compute beside it included."""
    issued = operations([half], planner.mesh.names, planner.prices)
    return replay(issued).seconds_with_contention(planner.cluster.contention)


def _reduction_seconds(planner: Planner, program: PredictedProgram, backward: float) -> float:
    """What the backward half takes longer where it reduces what others have left, of which it takes so many seconds."""
    if program.unreduced is None:
        return 0.0
    places = program.unreduced.places
    last = reduce_with_sums(program.backward.graph, program.unreduced, places)
    sums = last.find_nodes(op="placeholder")[-len(places) :]
    # Every backward adds its gradients to those before, which is left out of the seconds of all.
    added = sum(planner.prices.seconds(addition) for one in sums for addition in one.users)
    return max(0.0, _seconds(planner, last) - added - backward)


def _storage_bytes(node: fx.Node) -> int:
    """Bytes of the memory that a node's tensor lies in, which is its own."""
    val = node.meta.get("val")
    return val.numel() * val.element_size() if isinstance(val, torch.Tensor) else 0


@dataclass(frozen=True, slots=True)
class _BackwardHalves:
    """Backward in two halves: the share of its seconds that is for inputs, and the bytes that the other half needs."""

    share: float
    kept: int

    @staticmethod
    def of(planner: Planner, program: PredictedProgram, inputs: set[str]) -> _BackwardHalves:
        """The halves of a program's backward, `inputs` being those whose gradients the first makes."""
        graph, saved = program.backward.graph, program.backward.saved
        first = _ancestors(
            [node for (kind, name), node in program.outputs.items() if kind == "gradient" and name in inputs]
        )
        issued = operations([graph], planner.mesh.names, planner.prices)
        names = {node.name for node in first}
        every = sum(one.seconds for one in issued)
        share = sum(one.seconds for one in issued if one.name in names) / every if every else 0.0
        second = [node for node in graph.nodes if node.op == "call_function" and node not in first]
        read = {storage_root(source) for node in second for source in node.all_input_nodes} - set(second)
        kept = [node for node in read if node not in saved or storage_root(saved[node]).op != "placeholder"]
        sizes = (one.meta["val"] for one in kept if isinstance(one.meta["val"], torch.Tensor))
        return _BackwardHalves(share, sum(val.untyped_storage().nbytes() for val in sizes))


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all that they are made of."""
    found = set(nodes)
    waiting = list(nodes)
    while waiting:
        new = set(waiting.pop().all_input_nodes) - found
        found |= new
        waiting += new
    return found


@dataclass(frozen=True, slots=True)
class _StageMemory:
    """Bytes of one device: all the time; of one microbatch; beside these in a computation, and in the update."""

    rest: int
    saved: int
    working: int
    application: int


def _stage_memory(
    planned: PlannedStage, planner: Planner, flow: Flow, program: PredictedProgram, microbatches: int
) -> _StageMemory:
    graph, operators = planner.graph, planner.rules.operators
    forward = sum(graph.phase(node) == "forward" for node in operators)
    end = len(operators)  # the moment of the optimizer's step
    parameters = {source.name for source in graph.inputs if source.kind == "parameter"}
    every = list(allocations(flow, program, planner.settings.optimizer))
    rest = sum(one.bytes for one in every if one.kind in _AT_REST)
    rest += sum(_gradient_bytes(flow, program, parameters))
    rest += microbatches * sum(like.numel() * like.element_size() for _, like in planned.stage.inputs.values())
    moving = [one for one in every if one.kind != "input" and not _is_kept_all_step(one, parameters)]
    fresh = [one for one in every if one.kind == "gradient" and one.name in parameters and microbatches > 1]
    saved = sum(one.bytes for one in moving if one.start < forward < one.end)
    in_forward = peak(one for one in moving if one.start < forward)[0]
    in_backward = peak(_allocations_within([*moving, *fresh], forward, end))[0]
    application = sum(one.bytes for one in moving if one.kind == "temporary" and one.start >= end)
    return _StageMemory(rest, saved, max(in_forward, in_backward, saved) - saved, application)


def _is_kept_all_step(one: Allocation, parameters: set[str]) -> bool:
    """Whether it is there all through the step of a pipeline; gradients of inputs are sent and gone."""
    return one.kind in _AT_REST or (one.kind == "gradient" and one.name in parameters)


def _gradient_bytes(flow: Flow, program: PredictedProgram, parameters: set[str]) -> Iterator[int]:
    """Of every trained parameter, the bytes of its gradient: as its part here, or as what is added up if it is more."""
    for source in flow.graph.inputs:
        if source.name in parameters and ("gradient", source.name) in program.outputs:
            part, made = program.inputs[source.node.name], program.outputs["gradient", source.name]
            yield max(_storage_bytes(part), _storage_bytes(made))


def _allocations_within(every: Sequence[Allocation], start: int, end: int) -> Iterable[Allocation]:
    """What is held at some moment from `start` until before `end`, as far as it is held then."""
    for one in every:
        first, last = max(one.start, start), min(one.end, end)
        if first < last:
            yield Allocation(one.name, one.bytes, first, last, one.kind)


def _local_bytes(
    values: Sequence[tuple[str, torch.Tensor]], placed: dict[str, tuple[Placement, ...]], mesh: MeshShape
) -> int:
    """What one device holds of tensors; those that are placed nowhere are whole."""
    total = 0
    for name, like in values:
        shape: Sequence[int] = like.shape
        if name in placed:
            shape = local_shape(tuple(like.shape), Spec.of(*placed[name]), mesh)
        total += math.prod(shape) * like.element_size()
    return total


def _tied_gradient_seconds(planned: PlannedStage, links: Links, placement: Sequence[int]) -> float:
    """Seconds in which gradients of tied parameters are summed over the ranks whose stages hold them, once a step."""
    seconds = 0.0
    for name, stages in planned.stage.shared.items():
        parameter = planned.stage.module.get_parameter(name)
        if parameter.requires_grad:
            shape = local_shape(tuple(parameter.shape), Spec.of(*planned.plan.placements[name]), planned.plan.mesh)
            ranks = {placement[stage] for stage in stages}
            seconds += links.sum(math.prod(shape) * parameter.element_size(), len(ranks))
    return seconds
