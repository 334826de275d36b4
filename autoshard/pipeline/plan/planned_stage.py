"""A planned stage: its costs, derived from its plan's program, and the tensors exchanged with its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx
from torch.distributed.tensor import Placement, Replicate
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import call_layout
from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import closure
from autoshard.capture.recomputation import graph_of_plan
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import CostModel
from autoshard.cluster.worker_shares import apportion
from autoshard.errors import PlanError
from autoshard.memory.footprint import Allocation, peak
from autoshard.patterns.decisions import Decisions, Flow
from autoshard.pipeline.graph.microbatch import BATCH
from autoshard.pipeline.graph.stage_slices import BoundaryTensor, StageModule
from autoshard.pipeline.schedule.costs import StageCosts
from autoshard.planner.planner import Planner
from autoshard.planner.program_memory import allocations
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.aliasing import storage_root
from autoshard.program.predicted_program import PredictedProgram
from autoshard.program.program_replay import operations
from autoshard.reshard.reductions import reduce_with_sums
from autoshard.simulate.events import replay
from autoshard.size import DynamicSize, symbol
from autoshard.specs.axes import MeshShape, SharedAxis
from autoshard.specs.layout import dim_of, is_even, local_shape
from autoshard.specs.spec import Spec, is_shard

# Kinds of `Allocation` that exist throughout the step.
_AT_REST = ("parameter", "optimizer", "buffer")


@dataclass(frozen=True, slots=True)
class Links:
    """The links between the ranks of a pipeline, and prices of messages over them.

    Attributes:
        cost: the cost model of the whole mesh.
        axis: the index of the pipeline axis.
    """

    cost: CostModel
    axis: int

    @staticmethod
    def of(cluster: Cluster, mesh: MeshShape, axis: str) -> Links:
        """Return the links along an axis of a mesh on a cluster."""
        return Links(CostModel(cluster, mesh), mesh.index(axis))

    @property
    def bandwidth(self) -> float:
        """Bytes per second from one device to the next."""
        return self.cost.axis_link(self.axis).bandwidth

    def send(self, bytes: int) -> float:
        """Return the seconds of a message to the next rank."""
        # All devices of a stage send a message at the same time, so the slowest link of the axis counts.
        return self.cost.collective("shift", bytes, self.axis) if bytes else 0.0

    def sum(self, bytes: int, ranks: int) -> float:
        """Return the seconds of a ring all-reduce of gradients over some of the ranks."""
        if ranks < 2 or not bytes:
            return 0.0
        # A ring has as many reduction steps as there are other ranks, and as many gather steps.
        latency = self.cost.axis_link(self.axis).latency
        return 2 * (ranks - 1) * latency + bytes * self.sum_per_byte(ranks)

    def sum_per_byte(self, ranks: int) -> float:
        """Return the seconds of `sum` per byte, without latency."""
        return 2 * (ranks - 1) / ranks / self.bandwidth


@dataclass(frozen=True, slots=True, eq=False)
class PlannedStage:
    """A stage with its plan.

    Attributes:
        stage: its module, its inputs and its outputs.
        graph: its captured step for one microbatch.
        planner: the planner of that graph.
        plan: the decisions.
    """

    stage: StageModule
    graph: JointGraph
    planner: Planner
    plan: ShardingPlan

    @property
    def received(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Names of the inputs sent by the previous stage, each with a tensor like it."""
        names = [leaf for leaf in self.graph.call.leaves if isinstance(leaf, str)]
        return tuple((name, value.like) for name, value in zip(names, self.stage.received, strict=False))

    @property
    def passed(self) -> tuple[tuple[str, torch.Tensor], ...]:
        """Names of the outputs sent to the next stage, each with a tensor like it."""
        names = [output.name for output in self.graph.outputs if output.kind == "output"]
        return tuple((name, value.like) for name, value in zip(names, self.stage.passed, strict=False))

    @property
    def modules(self) -> tuple[str, str]:
        """Paths of the stage's first and last modules with operators, preferably among those with parameters."""
        forward = [node for node in self.graph.graph.nodes if self.graph.phase(node) == "forward"]
        paths = [self.graph.module_path(node) for node in forward if node.op == "call_function"]
        # Modules with parameters are most informative: a stage may begin with a view in a module of the previous stage.
        held = {name.rpartition(".")[0] for name, _ in self.stage.module.named_parameters(remove_duplicate=False)}
        named = [path for path in paths if path in held] or [path for path in paths if path] or [""]
        return named[0], named[-1]


def stage_costs(planned: PlannedStage, links: Links, microbatches: int, ranks_of: Iterable[int] = ()) -> StageCosts:
    """Return the costs of a planned stage.

    Seconds are those of the forward and the backward program, each replayed separately, communication included.
    Gradients that are summed over the microbatches are reduced by the last backward, which is also replayed; its
    additional time counts once per step. If a schedule splits backward, the half for inputs computes the gradients of
    the received tensors, and the half for weights the rest, which is everything on the first stage. The seconds of the
    whole backward are divided in proportion to the operations of each half.

    Bytes are those of the program's account. Saved are the tensors that both programs need, and the outputs of the
    stage, which the schedule keeps. Parameters, gradients, optimizer state, buffers, and the stage's part of the
    model's inputs for all microbatches are held throughout. Gradients have the size in which they are summed; from the
    second microbatch on, new gradients are held beside the sums until they are added.

    Args:
        planned: the stage.
        links: the links along the pipeline.
        microbatches: the number per step.
        ranks_of: the pipeline rank of every stage; empty if no parameter is tied.

    Returns:
        The costs. The optimizer's update takes no time here, as in `ShardingPlan.step_seconds`.
    """
    placement = tuple(ranks_of)
    flow, planner = _flow(planned)
    # A single microbatch has no sums of gradients: it reduces them as they are computed.
    reduced = planner.settings.reduced if microbatches > 1 else None
    program = planner.program(flow, reduced)
    forward, backward = (_seconds(planner, half) for half in (program.forward.graph, program.backward.graph))
    rest, saved, working, application = _stage_memory(planned, planner, flow, program, microbatches)
    trained = [(name, like) for name, like in planned.received if like.requires_grad]
    input_share, kept = _backward_halves(planner, program, {name for name, _ in trained})
    sent = _local_bytes(planned.passed, planned.plan.output_placements, planned.plan.mesh)
    # Gradients are sent back with the placements of the received tensors: sharded, or else whole.
    arriving = planned.plan.input_placements if planned.plan.options.get("inputs") == "local" else {}
    returned = _local_bytes(trained, arriving, planned.plan.mesh)
    tied_bytes, tied_seconds = _tied_gradients(planned, links, placement)
    return StageCosts(
        forward_seconds=forward,
        input_backward_seconds=backward * input_share,
        weight_backward_seconds=backward * (1 - input_share),
        forward_bytes=sent,
        forward_send_seconds=links.send(sent),
        backward_bytes=returned,
        backward_send_seconds=links.send(returned),
        rest_bytes=rest,
        saved_bytes=saved,
        weight_saved_bytes=kept,
        working_bytes=working,
        application_bytes=application,
        reduction_seconds=_reduction_seconds(planner, program, backward) + tied_seconds,
        tied_bytes=tied_bytes,
        tied_seconds=tied_seconds,
    )


def _flow(planned: PlannedStage) -> tuple[Flow, Planner]:
    """Return a plan's decisions on their graph, with its recomputation and moves."""
    planner, plan = planned.planner, planned.plan
    graph = graph_of_plan(planner.graph, plan.recomputed, plan.offloaded)
    if graph is not planner.graph:
        planner = Planner(graph, planner.mesh, planner.cluster, planner.constraints, planner.settings, like=planner)
    return Flow(planner.rules, Decisions.from_data(plan.decisions), planner.mesh), planner


def _seconds(planner: Planner, half: fx.Graph) -> float:
    """Return the seconds of one half of a program, including contention between communication and compute."""
    issued = operations([half], planner.mesh.names, planner.prices)
    return replay(issued).seconds_with_contention(planner.cluster.contention)


def _reduction_seconds(planner: Planner, program: PredictedProgram, backward: float) -> float:
    """Return the extra seconds of the last backward, which reduces gradients, beyond the `backward` of the others."""
    if program.unreduced is None:
        return 0.0
    places = program.unreduced.places
    last = reduce_with_sums(program.backward.graph, program.unreduced, places)
    sums = last.find_nodes(op="placeholder")[-len(places) :]
    # This graph adds its gradients to earlier ones. Every backward does, but the seconds of `backward` exclude that.
    added = sum(planner.prices.seconds(addition) for gradient in sums for addition in gradient.users)
    return max(0.0, _seconds(planner, last) - added - backward)


def _storage_bytes(node: fx.Node) -> int:
    """Return the bytes of a node's tensor, which owns its memory."""
    val = node.meta.get("val")
    return val.nbytes if isinstance(val, torch.Tensor) else 0


def _backward_halves(planner: Planner, program: PredictedProgram, inputs: set[str]) -> tuple[float, int]:
    """Split a program's backward into two halves, the first of which computes the gradients of `inputs`.

    Returns:
        The first half's fraction of the seconds of both, and the bytes that are kept for the second.
    """
    graph, saved = program.backward.graph, program.backward.saved
    wanted = [node for (kind, name), node in program.outputs.items() if kind == "gradient" and name in inputs]
    first = closure(wanted, lambda node: node.all_input_nodes)
    issued = operations([graph], planner.mesh.names, planner.prices)
    names = {node.name for node in first}
    total = sum(operation.seconds for operation in issued)
    share = sum(operation.seconds for operation in issued if operation.name in names) / total if total else 0.0
    second = [node for node in graph.nodes if node.op == "call_function" and node not in first]
    read = {storage_root(source) for node in second for source in node.all_input_nodes} - set(second)
    # Saved parameters and inputs of the model are held throughout.
    kept = [node for node in read if node not in saved or storage_root(saved[node]).op != "placeholder"]
    sizes = (node.meta["val"] for node in kept if isinstance(node.meta["val"], torch.Tensor))
    return share, sum(val.untyped_storage().nbytes() for val in sizes)


def _stage_memory(
    planned: PlannedStage, planner: Planner, flow: Flow, program: PredictedProgram, microbatches: int
) -> tuple[int, int, int, int]:
    """Return the bytes of `StageCosts` for one device: at rest, saved, working, and in the optimizer's update."""
    graph, operators = planner.graph, planner.rules.operators
    forward = sum(graph.phase(node) == "forward" for node in operators)
    end = len(operators)  # the moment of the optimizer's step, after all operators
    parameters = {source.name for source in graph.inputs if source.kind == "parameter"}
    held = list(allocations(flow, program, planner.settings.optimizer))
    rest = sum(item.bytes for item in held if item.kind in _AT_REST)
    rest += sum(_gradient_bytes(flow, program, parameters))
    rest += microbatches * sum(like.nbytes for _, like in planned.stage.inputs.values())

    def is_sum(item: Allocation) -> bool:
        # Gradients of parameters are kept throughout the step; gradients of inputs are sent and freed.
        return item.kind == "gradient" and item.name in parameters

    # Inputs of the model are counted for all microbatches above; received tensors are in the schedule's buffers.
    moving = [item for item in held if item.kind not in ("input", *_AT_REST) and not is_sum(item)]
    new_gradients = [item for item in held if is_sum(item) and microbatches > 1]
    saved = sum(item.bytes for item in moving if item.start < forward < item.end)
    in_forward = peak(item for item in moving if item.start < forward)[0]
    in_backward = peak(_allocations_within([*moving, *new_gradients], forward, end))[0]
    application = sum(item.bytes for item in moving if item.kind == "temporary" and item.start >= end)
    return rest, saved, max(in_forward, in_backward, saved) - saved, application


def _gradient_bytes(flow: Flow, program: PredictedProgram, parameters: set[str]) -> Iterator[int]:
    """Yield the bytes of every trained parameter's gradient: this rank's part, or the sum if that is larger."""
    for source in flow.graph.inputs:
        if source.name in parameters and ("gradient", source.name) in program.outputs:
            part, total = program.inputs[source.node.name], program.outputs["gradient", source.name]
            yield max(_storage_bytes(part), _storage_bytes(total))


def _allocations_within(held: Sequence[Allocation], start: int, end: int) -> Iterable[Allocation]:
    """Yield allocations clipped to the moments from `start` until before `end`."""
    for item in held:
        first, last = max(item.start, start), min(item.end, end)
        if first < last:
            yield item._replace(start=first, end=last)


def _local_bytes(
    values: Sequence[tuple[str, torch.Tensor]], placements: Mapping[str, tuple[Placement, ...]], mesh: MeshShape
) -> int:
    """Return the bytes of tensors on one device; those without placements are whole."""
    total = 0
    for name, like in values:
        shape: Sequence[int] = like.shape
        if name in placements:
            shape = local_shape(tuple(like.shape), Spec.of(*placements[name]), mesh)
        total += math.prod(shape) * like.element_size()
    return total


def _tied_gradients(planned: PlannedStage, links: Links, placement: Sequence[int]) -> tuple[int, float]:
    """Return the bytes of gradients of tied parameters, and the seconds per step to sum them over their ranks."""
    total, seconds = 0, 0.0
    for name, stages in planned.stage.shared.items():
        parameter = planned.stage.module.get_parameter(name)
        if parameter.requires_grad:
            held = _local_bytes([(name, parameter)], planned.plan.placements, planned.plan.mesh)
            ranks = len({placement[stage] for stage in stages})
            total += held if ranks > 1 else 0
            seconds += links.sum(held, ranks)
    return total, seconds


Tensors = tuple[torch.Tensor, ...]


class Boundaries:
    """Boundaries between stages.

    A stage with a plan for whole inputs receives whole tensors from the previous stage; one with a plan for local
    inputs receives them with the previous stage's output placements, so that only shards cross.

    Args:
        plans: the plans of all stages.
        mesh: the mesh of one stage.
        coordinate: this rank's coordinate on that mesh; needed if ranks have unequal shares.
    """

    def __init__(self, plans: Sequence[ShardingPlan], mesh: MeshShape, coordinate: Sequence[int] = ()) -> None:
        self._plans = plans
        self._mesh = mesh
        self._coordinate = coordinate

    def messages(self, stage: StageModule) -> tuple[Tensors, Tensors]:
        """Return the meta tensors that this rank receives for a stage, and those that it returns.

        Raises:
            PlanError: two stages disagree on the placements of a tensor between them, or ranks would have unequal parts
                of it.
        """
        inputs, outputs = self._input_placements(stage), self._output_placements(stage.index, len(stage.passed))
        if stage.index:
            sent = self._output_placements(stage.index - 1, len(stage.received))
            for value, sent_as, taken_as in zip(stage.received, sent, inputs, strict=True):
                if sent_as != taken_as and not all(place.is_replicate() for place in (*sent_as, *taken_as)):
                    raise PlanError(
                        f"stage {stage.index - 1} leaves {value.name} as {Spec.of(*sent_as)}, and stage {stage.index} "
                        f"takes it as {Spec.of(*taken_as)}: plan them so that they agree."
                    )
        returned = self._local_tensors(stage.index, stage.passed, outputs) if stage.passed else stage.returned
        return self._local_tensors(stage.index, stage.received, inputs), returned

    def _input_placements(self, stage: StageModule) -> list[tuple[Placement, ...]]:
        """Return the placements of a stage's received tensors."""
        plan, whole = self._plans[stage.index], Spec.all_replicated(self._mesh.ndim).placements
        # A plan for whole inputs lists placements, too: those with which it shards them itself.
        placements = plan.input_placements if plan.options.get("inputs") == "local" else {}
        return [placements.get(name, whole) for name in input_names(stage)[: len(stage.received)]]

    def _output_placements(self, index: int, count: int) -> list[tuple[Placement, ...]]:
        """Return the placements of the tensors that a stage passes on."""
        placements = self._plans[index].output_placements
        whole = Spec.all_replicated(self._mesh.ndim).placements
        return [placements.get(f"output[{place}]", whole) for place in range(count)]

    def _local_tensors(
        self, index: int, values: Sequence[BoundaryTensor], placements: Sequence[tuple[Placement, ...]]
    ) -> Tensors:
        """Return this rank's parts of the values that a stage receives or passes on."""
        # The ranks of at most one axis have unequal shares.
        axis, proportions = next(iter(self._plans[index].shares.items()), ("", ()))
        shared = SharedAxis(self._mesh.index(axis), len(proportions), symbol(BATCH)) if axis else None
        return tuple(
            self._local_tensor(value, Spec.of(*row), shared, proportions)
            for value, row in zip(values, placements, strict=True)
        )

    def _local_tensor(
        self, value: BoundaryTensor, spec: Spec, shared: SharedAxis | None, proportions: Sequence[int]
    ) -> torch.Tensor:
        """Return this rank's part of a value; ranks along the `shared` axis have samples in these proportions."""
        like = value.like
        if not parts_are_equal(value.shape, spec, self._mesh, shared):
            raise PlanError(
                f"{value.name} goes from stage to stage as {spec} on the mesh {self._mesh}, which does not part "
                f"{list(like.shape)} evenly: messages have one size on all ranks. Choose a number of samples that the "
                f"mesh divides, or plan whole boundaries."
            )
        shape = list(local_shape(tuple(like.shape), spec, self._mesh))
        dim = dim_in_shares(value.shape, spec, shared)
        if dim is not None and shared is not None:
            # The dim is a multiple of the samples, of which the rank has its share.
            size = value.shape[dim]
            assert isinstance(size, DynamicSize)
            samples = size.sizes[shared.whole]
            shape[dim] = int(size) // samples * apportion(samples, proportions)[self._coordinate[shared.axis]]
        return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)


def dim_in_shares(shape: Sequence[int], spec: Spec, shared: SharedAxis | None) -> int | None:
    """Return the dim of a value that is sharded by shares of the samples, or None."""
    if shared is None:
        return None
    placement = spec.placements[shared.axis]
    dim = dim_of(placement, len(shape)) if is_shard(placement) else None
    return dim if dim is not None and shared.is_of_whole(shape[dim]) else None


def parts_are_equal(shape: Sequence[int], spec: Spec, mesh: MeshShape, shared: SharedAxis | None) -> bool:
    """Return True if all ranks have equal parts of a value, or parts in proportion to their shares of the samples.

    Args:
        shape: the shape of the value, with dynamic sizes.
        spec: the spec of the value.
        mesh: the mesh of a stage.
        shared: the axis whose ranks have unequal shares, if any.
    """
    dim = dim_in_shares(shape, spec, shared)
    if dim is not None and shared is not None:
        rest = [Replicate() if axis == shared.axis else place for axis, place in enumerate(spec.placements)]
        # Another axis would split the shares further.
        if any(is_shard(place) and dim_of(place, len(shape)) == dim for place in rest):
            return False
        spec = Spec.of(*rest)
    return is_even(tuple(map(int, shape)), spec, mesh)


def input_names(stage: StageModule) -> list[str]:
    """Return the names of a stage's inputs in its plan, received ones first."""
    leaves, structure = pytree.tree_flatten(stage.example)
    return [str(name) for name in call_layout(stage.module, structure, leaves).leaves]
