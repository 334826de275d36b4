"""Programs of a parallelised module: captures and plans its calls, and places its parameters."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph, Tangents
from autoshard.capture.python.fake_module import check_parameters
from autoshard.options.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.build_program import PlannedGraph, build_program, split_again
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime.calls import NewCall, PinsByName, PlacementsByName, without_numbers
from autoshard.runtime.gradient_sums import GradientSums
from autoshard.runtime.in_place_changes import check_constants
from autoshard.runtime.optimizers import replace_in_optimizers
from autoshard.runtime.placed_tensor import make_state_whole, place_parameters
from autoshard.runtime.rank_agreement import (
    HostGroups,
    Seeds,
    check_ranks_agree,
    from_first_rank,
    is_first_rank,
    on_all_ranks,
)
from autoshard.runtime.shards import check_fits, place_buffers
from autoshard.runtime.step import Ranks, RunnableStep
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


class Call(Protocol):
    """A captured call, such as `autoshard.planner.planning.CapturedCall`."""

    @property
    def graph(self) -> JointGraph: ...


class CallPlanner(Protocol):
    """Plans the calls of the module; implemented and documented by `autoshard.planner.module_planner.ModulePlanner`."""

    requested: Target
    target: Target

    @property
    def logits_room(self) -> float: ...

    def capture(
        self,
        call: BoundCall,
        *,
        tangents: Tangents,
        dynamic: bool,
        quiet: bool,
        logits_room: float | None,
        placed: PlacementsByName | None,
        input_pins: PinsByName,
    ) -> Call: ...

    def check(self, call: Any) -> None: ...

    def plan(self, call: Any) -> ShardingPlan: ...

    def form_of(self, call: Any, plan: ShardingPlan) -> Call: ...

    def apply(self, call: Any, plan: ShardingPlan, *, given: bool) -> PlannedGraph: ...

    def forget(self) -> None: ...

    def for_module(self, module: nn.Module) -> CallPlanner: ...


class ProgramMaker:
    """Makes the programs of one module's calls, and places its parameters with the first one.

    Args:
        module, device_mesh, plan: as for `autoshard.parallelize`.
        planner: plans the calls of the module.
        part: the index of this module if it is a part of a larger one whose other parts run on other ranks.
        later: a list to which every backward, after the gradients of inputs, appends a function that computes and
            accumulates those of parameters; None to compute them at once.
        sums: the sums of gradients, reduced by the last of several backwards; None to reduce in each backward.
        reduced: when to reduce gradients that become smaller by reduction.

    Attributes:
        hosts: process groups of the mesh for CPU tensors.
        placed: the placements of parameters and buffers by name; None before a plan has placed them.
        hosted: the names of parameters with optimizer state on the host; None before a call with gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        planner: CallPlanner,
        plan: ShardingPlan | None,
        part: int = 0,
        later: list[Callable[[], None]] | None = None,
        sums: GradientSums | None = None,
        reduced: DeferredReduction = "step",
    ) -> None:
        self.module = module
        self.device_mesh = device_mesh
        self.mesh = MeshShape.of(device_mesh)
        self.planner = planner
        self.plan = plan
        self.hosts = HostGroups(device_mesh)
        self.placed: PlacementsByName | None = None
        self.hosted: tuple[str, ...] | None = None
        self._part = part
        self._later = later
        self._logits_room: float | None = None
        self._sums = sums
        self._reduced: DeferredReduction = reduced
        self._seeds = Seeds(device_mesh, self.hosts)

    def for_module(self, module: nn.Module) -> ProgramMaker:
        """Return the maker for a copy of the module; it shares placements, plan, planner, process groups and seeds."""
        maker = copy.copy(self)
        maker.module, maker.planner = module, self.planner.for_module(module)
        return maker

    @property
    def target(self) -> Target:
        """The target of the plans."""
        return self.planner.target

    @property
    def shares(self) -> tuple[int, tuple[int, ...]] | None:
        """A mesh axis and the shares of its ranks; None if equal. The first plan resolves `shares="auto"`."""
        shares = self.planner.requested.shares
        if not isinstance(shares, Mapping):
            return None
        ((axis, counts),) = shares.items()
        return self.mesh.index(axis), tuple(counts)

    def option_texts(self) -> dict[str, str]:
        """Return the options and the plan, which must be equal on all ranks, as texts by their names."""
        plan, options = self.plan, self.target.options
        wanted: dict[str, Any] = {name: getattr(self.target, name) for name in ("inputs", "outputs", "data_axes")}
        wanted |= {"mp_policy": options.mp_policy}
        wanted |= {name: getattr(self.target.settings, name) for name in ("recompute", "offload", "method", "effort")}
        wanted |= {"offload_optimizer": options.offload_optimizer}
        return {
            "the plan that is given": "none" if plan is None else f"one of the graph {plan.fingerprint[:12]}",
            "the decisions of the plan that is given": "none" if plan is None else _digest(plan),
            **{f"the option {name}": str(value) for name, value in wanted.items()},
            "the option unread_outputs": str(tuple(options.unread_outputs)),
            "the option accumulate": str(options.accumulate),
            "the option compile": str(options.compile),
        }

    def replicate_parameters(self) -> None:
        """Replicate all parameters on every rank, until the first call is planned."""
        check_parameters(self.module)
        whole = Spec.all_replicated(self.mesh.ndim)
        place_parameters(self.module, {name: whole for name, _ in self.module.named_parameters()}, self.device_mesh)
        self.module.sharding_plan = None  # type: ignore[assignment]

    def make(
        self, call: NewCall, programs: Mapping[str, RunnableStep], input_pins: PinsByName
    ) -> tuple[JointGraph, RunnableStep]:
        """Capture a call, plan it, and return its graph and program; all ranks call this together.

        Args:
            call: the call.
            programs: programs of the signature for other states of the module, by the fingerprints of their graphs.
            input_pins: the known placements of inputs in the program.
        """
        make_state_whole(self.module)
        if self._logits_room is None:
            # Devices and limits may differ between ranks, but all must capture the same graph.
            text = from_first_rank(self.device_mesh, lambda: str(self.planner.logits_room))
            self._logits_room = float(text)
        captured = on_all_ranks(self.device_mesh, lambda: self._capture(call, input_pins))
        graph = captured.graph
        # Before planning: otherwise a module that alternates between two states would be planned at every change.
        program = self._program_of_equal_graph(graph, programs)
        if program is not None:
            return graph, program
        plan, captured = self._agree_on_plan(captured)
        planned = on_all_ranks(self.device_mesh, lambda: self.planner.apply(captured, plan, given=plan is self.plan))
        ranks = Ranks(self.device_mesh, torch.device(self.device_mesh.device_type), self._part, self._seeds)
        # If more than the loss is differentiated, gradients are reduced at once.
        sums = self._sums if call.tangents == "loss" else None
        compile = self.target.options.compile
        step, halves = build_program(
            planned,
            ranks.groups,
            ranks.device,
            compile=compile,
            in_parts=self._later is not None,
            reduced=None if sums is None else self._reduced,
            in_place=True,
        )
        if self.placed is None:
            self._place(plan)
        else:
            self._place_new(plan)
        if self.hosted is None and graph.gradients:
            self.hosted = plan.hosted
        # Price tables are large, and a later call may never need planning.
        self.planner.forget()
        # A pipeline's programs are made in their final form; one that differentiates all outputs is not split again.
        split = None
        if sums is None and call.tangents == "loss":
            split = functools.partial(split_again, step)
        program = RunnableStep(step, halves, ranks, later=self._later, sums=sums, split=split, compiled=compile)
        return planned.graph, program

    def _program_of_equal_graph(self, graph: JointGraph, programs: Mapping[str, RunnableStep]) -> RunnableStep | None:
        """Return the program of an equal graph in another state of the module, as before `forward` set attributes."""
        # Parameters of new modules must be placed first.
        if not programs or not all(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            return None
        texts = {"the graph": graph.fingerprint[:12] if graph.fingerprint in programs else "a new one"}
        check_ranks_agree(self.device_mesh, texts, "Have the module in the same state on all ranks.")
        return programs.get(graph.fingerprint)

    def _capture(self, call: NewCall, input_pins: PinsByName) -> Call:
        """Capture a call, and check that the options fit it."""
        # No rank knows the numbers of the whole batch.
        is_local = self.target.inputs == "local"
        captured = self.planner.capture(
            call.bound.map_tensors(without_numbers) if is_local else call.bound,
            tangents=call.tangents,
            dynamic=call.dynamic,
            quiet=not is_first_rank(self.device_mesh),
            logits_room=self._logits_room,
            placed=self._current_placements(),
            input_pins=input_pins,
        )
        check_constants(captured.graph, self.module)
        self.planner.check(captured)
        return captured

    def _current_placements(self) -> PlacementsByName | None:
        """Return the placements of everything placed so far, and of parameters of new modules with the same names."""
        if self.placed is None:
            return None
        parameters = dict(self.module.named_parameters(remove_duplicate=False))
        current = {name: placements for name, placements in self.placed.items() if name not in parameters}
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                current[name] = tuple(parameter.placements)
            elif name in self.placed:
                with contextlib.suppress(ValueError):
                    check_fits(parameter.shape, Spec.of(*self.placed[name]), self.device_mesh)
                    current[name] = self.placed[name]
        return current

    def _agree_on_plan(self, call: Call) -> tuple[ShardingPlan, Call]:
        """Return the user's plan, for the first call, or the first rank's, and the call in the plan's form."""
        graph = call.graph
        held = {
            name: tuple(source.node.meta["val"].shape)
            for source in graph.inputs
            if source.kind in ("parameter", "buffer")
            for name in graph.aliases[source.name]
        }
        decided = self.plan if self.placed is None else None
        if decided is None:
            check_ranks_agree(
                self.device_mesh,
                {
                    "its parameters and buffers": f"{len(held)} of {sum(map(math.prod, held.values()))} numbers",
                    "the graph that was captured": graph.fingerprint[:12],
                },
                "The module is another one there, or forward does something else with arguments of the same shapes: "
                "check what hangs on chance (Python's random, NumPy's), on the rank, or on attributes that are not the "
                "same on all ranks.",
            )
            # Rank 0 plans and sends the plan as text: a search under a time limit ends differently on every rank.
            text = from_first_rank(self.device_mesh, lambda: self.planner.plan(call).to_json())
            decided = ShardingPlan.from_json(text)
        # Errors are raised on all ranks together: otherwise the other ranks would wait in a collective.
        planned = on_all_ranks(self.device_mesh, lambda: self.planner.form_of(call, decided))
        on_all_ranks(self.device_mesh, lambda: decided.check(self.mesh, planned.graph.fingerprint, held))
        return decided, planned

    def _place(self, decided: ShardingPlan) -> None:
        whole = Spec.all_replicated(self.mesh.ndim).placements
        specs = {name: Spec.of(*decided.placements.get(name, whole)) for name, _ in self.module.named_parameters()}
        place_parameters(self.module, specs, self.device_mesh)
        self.placed = dict(decided.placements)
        self.module.sharding_plan = decided  # type: ignore[assignment]

    def _place_new(self, decided: ShardingPlan) -> None:
        """Place the parameters of modules added since, and replace them in optimizers that hold them."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        plain = [name for name, parameter in named.items() if not isinstance(parameter, DTensor)]
        if not plain:
            return
        whole = Spec.all_replicated(self.mesh.ndim).placements
        specs = {
            name: Spec.of(*(parameter.placements if isinstance(parameter, DTensor) else lying))
            for name, parameter in named.items()
            for lying in [decided.placements.get(name, whole)]
        }
        before = WeakTensorKeyDictionary({named[name]: name for name in plain})
        # With these references, `replace_in_optimizers` would find an owner of each parameter.
        del named
        place_parameters(self.module, specs, self.device_mesh)
        for name in plain:
            place_buffers(self.module.get_submodule(name.rpartition(".")[0]), self.device_mesh)
        replace_in_optimizers({old: self.module.get_parameter(name) for old, name in before.items()})


def _digest(plan: ShardingPlan) -> str:
    """Return a digest of a plan's decisions, independent of when and where it was planned."""
    decided = json.dumps([plan.decisions, plan.recomputed, plan.offloaded], sort_keys=True, default=str)
    return hashlib.blake2b(decided.encode(), digest_size=6).hexdigest()
