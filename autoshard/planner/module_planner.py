"""The planner of the calls of one module on one mesh: captures a call, plans it, and checks its plan."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph, Tangents
from autoshard.errors import PlanError
from autoshard.options.target import Target
from autoshard.planner.loss_forms import plan_losses
from autoshard.planner.plan_checks import checked_flow
from autoshard.planner.planner import Planner
from autoshard.planner.planning import CapturedCall, PlannerCache, capture_with_progress
from autoshard.planner.shares import part_count, with_shares
from autoshard.planner.target_constraints import PinsByName, PlacementsByName
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.build_program import PlannedGraph
from autoshard.specs.axes import MeshShape


class ModulePlanner:
    """Plans the calls of one module on one mesh. The planners of all calls share their tables of operators and tensors.

    Args:
        module: the module.
        mesh: the mesh axes.
        target: the options of the user.

    Attributes:
        requested: the options of the user; from the first plan on, with its shares instead of `shares="auto"`.
        target: the same at the prices of devices with these shares.

    Raises:
        MeshError: the mesh has no axis with the name in `shares`.
        PlanError: there are not as many shares as ranks.
    """

    def __init__(self, module: nn.Module, mesh: MeshShape, target: Target) -> None:
        self.module = module
        self.mesh = mesh
        self.requested = self.target = target
        self._planners = PlannerCache(module, mesh)
        self._has_trained = False  # a call with gradients was captured
        self._is_in_pieces = False  # the loss form of the last call with gradients, which later calls try first
        if target.shares != "auto":
            self._settle_shares(target.shares or {})

    def _settle_shares(self, shares: Mapping[str, Sequence[int]]) -> None:
        """Fix the shares of the ranks of an axis for all later calls; equal shares if there are none."""
        self.requested = replace(self.requested, shares=shares or None)
        self.target = with_shares(self.requested, self.mesh, shares)

    def _settle_hosted(self, plan: ShardingPlan) -> None:
        """Fix the optimizer state on the host to that of the first plan of training."""
        asked = self.target.settings.offload_optimizer
        if asked == "auto" or (asked == "none" and plan.hosted):
            hosted = frozenset(plan.hosted)
            self.requested, self.target = (
                replace(target, settings=replace(target.settings, offload_optimizer=hosted))
                for target in (self.requested, self.target)
            )

    def capture(
        self,
        call: BoundCall,
        *,
        tangents: Tangents = "loss",
        dynamic: bool = True,
        by_layers: bool = False,
        quiet: bool = False,
        logits_room: float | None = None,
        placed: PlacementsByName | None = None,
        input_pins: PinsByName | None = None,
    ) -> CapturedCall:
        """Capture a call.

        Args:
            call, tangents, dynamic, by_layers, quiet: as for `capture_with_progress`.
            logits_room: as there; a loss that fits is whole, unless its plan differs. None: large losses are in pieces.
            placed: fixed placements of parameters and buffers; None for the first call.
            input_pins: the placements of some inputs, None where the planner decides. Other global inputs are
                replicated.

        Raises:
            CaptureError: the call can't be captured.
            HintError: a hint of a region is invalid, or changes nothing.
        """

        def capture_form(room: float | None) -> tuple[JointGraph, float]:
            return capture_with_progress(
                *(call, self.target),
                devices=self.mesh.size,
                logits_room=room,
                tangents=tangents,
                dynamic=dynamic,
                by_layers=by_layers,
                quiet=quiet,
                first=not self._has_trained,
            )

        graph, seconds = capture_form(0.0 if self._is_in_pieces and logits_room is not None else logits_room)
        self._has_trained |= bool(graph.gradients)
        # An earlier call has placed the parameters, without shares.
        if self.requested.shares == "auto" and placed is not None:
            self._settle_shares({})
        captured = CapturedCall(graph, seconds, self.mesh, self.requested, self._planners, placed, input_pins or {})
        if graph.twice_in_pieces and logits_room is not None:
            captured.capture_other = lambda: self._other_form(captured, capture_form)
        return captured

    def _other_form(
        self, call: CapturedCall, capture_form: Callable[[float | None], tuple[JointGraph, float]]
    ) -> CapturedCall:
        graph, seconds = capture_form(math.inf if call.is_in_pieces else 0.0)
        seconds += call.seconds
        return CapturedCall(graph, seconds, call.mesh, call.target, call.planner_cache, call.placed, call.input_pins)

    @property
    def logits_room(self) -> float:
        """Most bytes of a device for whole logits of a loss and their log-probabilities."""
        settings, cluster = self.target.settings, self.target.cluster
        held = sum(
            parameter.numel() * parameter.dtype.itemsize
            + (self._state_bytes(parameter) if settings.offload_optimizer == "none" else 0)
            for parameter in self.module.parameters()
        )
        room = max(0.0, (settings.memory_limit or cluster.device.memory) - held / self.mesh.size)
        # Compiled programs hold only one of the two.
        return 2 * room if self.target.options.compile else room

    def _state_bytes(self, parameter: nn.Parameter) -> int:
        optimizer, shape = self.target.settings.optimizer, parameter.shape
        return optimizer.state_bytes(shape, shape, parameter.dtype.itemsize) if parameter.requires_grad else 0

    def check(self, call: CapturedCall) -> None:
        """Raise the error of options that do not fit the module or the mesh."""
        call.planner_of(self.target)  # constraints are checked as they are made

    def plan(self, call: CapturedCall) -> ShardingPlan:
        """Return the plan of a call: the placements of parameters, and the split of every operator.

        Raises:
            AutoshardError: as for `autoshard.plan`.
        """
        return plan_losses(call)

    def form_of(self, call: CapturedCall, plan: ShardingPlan) -> CapturedCall:
        """Return a call with its losses in the form of a plan: whole, or in pieces."""
        return call.form_of(plan)

    def apply(self, call: CapturedCall, plan: ShardingPlan, *, given: bool) -> PlannedGraph:
        """Return the graph with the decisions of a plan, after checking them; its shares are fixed for later calls.

        Args:
            call: the call.
            plan: its plan.
            given: True if the user gave the plan.

        Raises:
            PlanError: the decisions do not fit the graph, or the plan has other shares than the options.
        """
        graph = call.graph
        if self.requested.shares == "auto":
            self._settle_shares(plan.shares)
        # The decisions are for the graph with dims in parts.
        if plan.parts:
            (counts,) = plan.shares.values()
            graph = call.graph_in_parts(plan.parts, part_count(counts))
        planner = call.planner_of(self.target, graph)
        # A plan of this planner has the shares of the options by construction.
        if given:
            _check_shares(plan, planner, self.requested)
        flow = checked_flow(planner, plan)
        if graph.gradients:
            self._settle_hosted(plan)
            self._is_in_pieces = call.is_in_pieces
        return PlannedGraph(graph, flow, planner.resharder, planner.cost, planner.constraints.shared)

    def forget(self) -> None:
        """Drop the results of searches, which take much memory; keep the tables for later calls."""
        self._planners.forget()

    def for_module(self, module: nn.Module) -> ModulePlanner:
        """Return a planner of a copy of the module, which shares the tables of operators and tensors."""
        planner = copy.copy(self)
        planner.module, planner._planners = module, self._planners.for_module(module)
        return planner


def _check_shares(plan: ShardingPlan, planner: Planner, requested: Target) -> None:
    """Raise a `PlanError` if a user's plan has other shares than the options, or shares of nothing."""
    if not plan.shares:
        return
    shares = requested.shares if isinstance(requested.shares, Mapping) else {}
    if {axis: tuple(counts) for axis, counts in shares.items()} != plan.shares:
        raise PlanError(
            f"the plan has the shares {plan.shares}, and parallelize was asked for {dict(shares) or 'none'}: pass "
            "the same, or leave shares out."
        )
    if planner.constraints.shared is None:
        raise PlanError(
            f"the plan has the shares {plan.shares}, and nothing in this call is shared: no dim is in parts, and "
            "none is dynamic. Pass dynamic as the plan was made with, or make the plan again."
        )
