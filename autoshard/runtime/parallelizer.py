"""One parallelised module: its plan, its parameters, and a program for every way in which it is called."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture import outside_modes
from autoshard.capture.fake_module import check_parameters
from autoshard.capture.joint import JointGraph
from autoshard.errors import PlanError
from autoshard.patterns.decisions import Flow
from autoshard.patterns.parts import with_unequal_loops
from autoshard.planner.batch_shares import plan_with_shares, with_shares
from autoshard.planner.part_shares import part_count, plan_shares
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache, capture_with_progress, checked_flow
from autoshard.planner.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.overlap import Arrangement, TorchArrangement, arrange_own
from autoshard.program.program_replay import KernelPrices
from autoshard.program.size_generic import size_generic_step
from autoshard.program.split import split
from autoshard.reshard.deferred_reductions import DeferredReduction
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.constants import check_constants
from autoshard.runtime.gradient_sums import GradientSums
from autoshard.runtime.host_groups import Seeds
from autoshard.runtime.module_runtime import ADVICE, Runtime, Tangents, wants_gradient
from autoshard.runtime.optimizers import prepare_optimizers, replace_in_optimizers
from autoshard.runtime.rank_agreement import check_ranks_agree, from_first_rank, is_first_rank, on_all_ranks
from autoshard.runtime.shards import check_fits, place_buffers, replace_parameters
from autoshard.runtime.step import LocalProgram, Ranks
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


class Parallelizer:
    """One parallelised module: makes the program of every call signature, and places parameters once.

    Args:
        module, device_mesh, plan: as for `autoshard.parallelize`.
        part: of a larger module that other ranks run other parts of, the number of this one.
        later: where every backward puts what is left of it, once gradients of inputs are made: gradients of parameters
            are added to theirs by whoever calls it.
        sums: where backwards add up gradients of parameters that are reduced by the last of them.
        reduced: which ones these are.
    """

    def __init__(
        self,
        module: nn.Module,
        device_mesh: DeviceMesh,
        target: Target,
        plan: ShardingPlan | None,
        part: int = 0,
        later: list[Callable[[], None]] | None = None,
        sums: GradientSums | None = None,
        reduced: DeferredReduction = "step",
    ) -> None:
        self.part = part
        self.later = later
        self.sums = sums
        self.reduced: DeferredReduction = reduced
        self.module = module
        self.device_mesh = device_mesh
        self.mesh = MeshShape.of(device_mesh)
        self.given_options = self.target = target
        self.plan = plan
        self.placed: dict[str, tuple[Placement, ...]] | None = None
        self.planners = PlannerCache(module, self.mesh)
        self.runtime = Runtime(module, device_mesh, self.prepare, target.inputs, target.dynamic)
        if target.shares != "auto":
            self._set_shares(target.shares or {})
        self.seeds = Seeds(device_mesh, self.runtime.hosts)
        self.runtime.planned_outputs = target.output_placements is not None

    def _set_shares(self, given: Mapping[str, Sequence[int]]) -> None:
        """Have the ranks of an axis take such shares from now on; equal ones where none are given."""
        self.given_options = replace(self.given_options, shares=given or None)
        self.target = with_shares(self.given_options, self.mesh, given)
        for axis, shares in given.items():
            self.runtime.shares = self.mesh.index(axis), tuple(shares)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan and place now if there is an example call, else replicate and plan at the first call.

        Raises:
            InputError: other ranks have other options, plans or examples; nothing was changed.
        """
        before = WeakTensorKeyDictionary({parameter: name for name, parameter in self.module.named_parameters()})
        check_ranks_agree(
            self.device_mesh,
            self._option_texts(args or kwargs),
            "Call parallelize with the same arguments on all ranks.",
        )
        if args or kwargs:
            self.runtime.program_for_call(
                args, kwargs, torch.is_grad_enabled() and wants_gradient(self.module, args, kwargs)
            )
        else:
            check_parameters(self.module)
            whole = Spec.all_replicated(self.mesh.ndim)
            replace_parameters(
                self.module, {name: whole for name, _ in self.module.named_parameters()}, self.device_mesh
            )
            self.module.sharding_plan = None  # type: ignore[assignment]
        place_buffers(self.module, self.device_mesh)
        install_hooks(self.module)
        self.runtime.install()
        # Parameters that are left are held by somebody else, such as an optimizer that was made before.
        left = {old: self.module.get_parameter(name) for old, name in before.items() if not isinstance(old, DTensor)}
        replace_in_optimizers(left)
        prepare_optimizers(self.module)

    def _option_texts(self, example: Any) -> dict[str, str]:
        """What the user asked for, as far as all ranks must ask for the same."""
        settings, plan = self.target.settings, self.plan
        options = self.target.options
        wanted = {"inputs": self.target.inputs, "overlap": options.overlap, "mp_policy": options.mp_policy}
        wanted |= {name: getattr(settings, name) for name in ("recompute", "method", "effort")}
        return {
            "whether an example call is given": "one" if example else "none",
            "the plan that is given": "none" if plan is None else f"one of the graph {plan.fingerprint[:12]}",
            "the decisions of the plan that is given": "none" if plan is None else _digest(plan),
            **{f"the option {name}": str(value) for name, value in wanted.items()},
            "the option compile": str(self.target.options.compile),
        }

    def prepare(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        tangents: Tangents,
        signature: Hashable,
        dynamic: bool,
    ) -> tuple[JointGraph, LocalProgram]:
        """Graph and program of one call."""
        device = torch.device(self.device_mesh.device_type)
        check_ranks_agree(
            self.device_mesh,
            self.runtime.describe_new_call(args, kwargs, grad, signature),
            ADVICE,
        )
        graph, planner, seconds = on_all_ranks(
            self.device_mesh, lambda: self._capture(args, kwargs, grad, tangents, dynamic)
        )
        wants_all = tangents == "all" or not grad or _differentiates_all(graph)
        general = None if wants_all else self._general_program(graph, args, kwargs, signature, dynamic)
        program = self._program_of_equal_graph(graph, signature)
        if program is not None:
            return graph, replace(program, general=general)
        decided = self._agree_on_plan(graph, planner, seconds)
        graph, planner, flow = on_all_ranks(self.device_mesh, lambda: self._apply_plan(graph, planner, decided))
        ranks = Ranks(self.device_mesh, device, self.part, self.seeds)
        with outside_modes():
            step = size_generic_step(flow, planner.resharder, ranks.groups, device, planner.constraints.shared)
            # Who differentiates more than the loss is given reduced gradients at once.
            sums = self.sums if tangents == "loss" else None
            reduced = None if sums is None else self.reduced
            arrange: Arrangement = arrange_own
            if self.target.options.overlap == "torch":
                unsized = bool(dynamic and self.target.dynamic)
                arrange = TorchArrangement(KernelPrices(planner.cost), ranks.groups, unsized)
            halves = split(
                step, self.target.options.compile, in_parts=self.later is not None, reduced=reduced, arrange=arrange
            )
        if self.placed is None:
            self._place(decided)
        else:
            self._place_new(decided)
        self.runtime.record_inputs(step.inputs)
        self.planners.forget()
        return graph, LocalProgram(step, halves, ranks, general, self.later, sums)

    def _program_of_equal_graph(self, graph: JointGraph, signature: Hashable) -> LocalProgram | None:
        """Return the program of another state of the module in which the graph was equal, such as before an attribute
        that `forward` sets was set; None where there is none.
        """
        known = {served.graph.fingerprint: served.program for served in self.runtime.programs_for(signature)}
        if not all(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            return None  # those of new modules have to be placed
        if known:
            said = {"the graph": graph.fingerprint[:12] if graph.fingerprint in known else "a new one"}
            check_ranks_agree(self.device_mesh, said, "Have the module in the same state on all ranks.")
        return known.get(graph.fingerprint)

    def _general_program(
        self, graph: JointGraph, args: tuple[Any, ...], kwargs: dict[str, Any], signature: Hashable, dynamic: bool
    ) -> Callable[[], LocalProgram]:
        """Return a function that makes the program in which every output has a gradient."""
        # What the graph depends on of the numbers in its inputs has to be the same again.
        like = _with_numbers if graph.state.conditions.inputs else _without_numbers
        like_args, like_kwargs = pytree.tree_map_only(torch.Tensor, like, (args, kwargs))

        def make_program() -> LocalProgram:
            with graph.state.guards.captured_values():
                return self.runtime.prepare(like_args, like_kwargs, True, "all", signature, dynamic).program

        return make_program

    def _capture(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        grad: bool,
        tangents: Tangents,
        dynamic: bool,
    ) -> tuple[JointGraph, Planner, float]:
        """The graph of one call, its planner, and the seconds that the capture took."""
        quiet = not is_first_rank(self.device_mesh)
        if self.target.inputs == "local":  # no rank knows the numbers of the whole batch
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_numbers, (args, kwargs))
        graph, seconds = capture_with_progress(
            self.module, args, kwargs, self.target, grad=grad, tangents=tangents, dynamic=dynamic, quiet=quiet
        )
        check_constants(graph, self.module)
        return graph, self._planner(graph), seconds

    def _planner(self, graph: JointGraph) -> Planner:
        return self._planner_with(graph, self.target)

    def _planner_with(self, graph: JointGraph, target: Target) -> Planner:
        known = self.runtime.input_placements if target.inputs == "local" else {}
        return self.planners.of(graph, target, self._current_placements(), known)

    def _current_placements(self) -> dict[str, tuple[Placement, ...]] | None:
        """Where parameters lie that were placed, and where those of new modules are to lie that have their names."""
        if self.placed is None:
            return None
        lying = {}
        for name, parameter in self.module.named_parameters(remove_duplicate=False):
            if isinstance(parameter, DTensor):
                lying[name] = tuple(parameter.placements)
            elif name in self.placed:
                with contextlib.suppress(ValueError):
                    check_fits(parameter.shape, Spec.of(*self.placed[name]), self.device_mesh)
                    lying[name] = self.placed[name]
        return lying

    def _agree_on_plan(self, graph: JointGraph, planner: Planner, seconds: float) -> ShardingPlan:
        """The plan given by the user for the first call; else the first rank's."""
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
            text = from_first_rank(self.device_mesh, lambda: self._make_plan(graph, planner, seconds).to_json())
            decided = ShardingPlan.from_json(text)
        on_all_ranks(self.device_mesh, lambda: decided.check(self.mesh, graph.fingerprint, held))
        return decided

    def _apply_plan(
        self, graph: JointGraph, planner: Planner, decided: ShardingPlan
    ) -> tuple[JointGraph, Planner, Flow]:
        """The graph, in parts where a plan has such, its planner, and the decisions on it.

        Raises:
            PlanError: the decisions do not fit the graph, or the plan's shares what was asked for.
        """
        if self.target.shares == "auto":
            self._set_shares(decided.shares)
            planner = self._planner(graph) if decided.shares else planner
        if decided.parts:
            (counts,) = decided.shares.values()
            graph = with_unequal_loops(graph, self.mesh, decided.parts, part_count(counts))
            planner = self._planner(graph)
        if decided is self.plan:
            self._check_shares(decided, planner)
        return graph, planner, checked_flow(planner, decided)

    def _check_shares(self, given: ShardingPlan, planner: Planner) -> None:
        """`PlanError` if a plan that the user gave has other shares than those asked for, or shares of nothing."""
        if not given.shares:
            return
        asked = self.target.shares if isinstance(self.target.shares, Mapping) else {}
        if {axis: tuple(taken) for axis, taken in asked.items()} != given.shares:
            raise PlanError(
                f"the plan has the shares {given.shares}, and parallelize was asked for {dict(asked) or 'none'}: pass "
                "the same, or leave shares out."
            )
        if planner.constraints.shared is None:
            raise PlanError(
                f"the plan has the shares {given.shares}, and nothing in this call is shared: no dim is in parts, and "
                "none is dynamic. Pass dynamic as the plan was made with, or make the plan again."
            )

    def _make_plan(self, graph: JointGraph, planner: Planner, seconds: float) -> ShardingPlan:
        first, shares = self.placed is None, self.given_options.shares
        if (shares == "auto" and first) or (isinstance(shares, Mapping) and not self.target.dynamic):
            return plan_shares(graph, self.mesh, self.given_options, seconds, self._planner_with, self.placed)
        return plan_with_shares(planner, seconds, self.target)

    def _place(self, decided: ShardingPlan) -> None:
        whole = Spec.all_replicated(self.mesh.ndim).placements
        specs = {name: Spec.of(*decided.placements.get(name, whole)) for name, _ in self.module.named_parameters()}
        replace_parameters(self.module, specs, self.device_mesh)
        self.placed = dict(decided.placements)
        self.module.sharding_plan = decided  # type: ignore[assignment]

    def _place_new(self, decided: ShardingPlan) -> None:
        """Place the parameters of modules that were added since, and give them to optimizers that hold them."""
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
        del named
        replace_parameters(self.module, specs, self.device_mesh)
        for name in plain:
            place_buffers(self.module.get_submodule(name.rpartition(".")[0]), self.device_mesh)
        replace_in_optimizers({old: self.module.get_parameter(name) for old, name in before.items()})


def _digest(plan: ShardingPlan) -> str:
    """What differs between plans that decide other things, made when and wherever."""
    decided = json.dumps([plan.decisions, plan.recomputed], sort_keys=True, default=str)
    return hashlib.blake2b(decided.encode(), digest_size=6).hexdigest()


def _differentiates_all(graph: JointGraph) -> bool:
    """Whether the program of a graph starts its backward half from every output that has a gradient.

    It starts from scalars alone where there are any, so one that starts from another output starts from all.
    """
    outputs = {output.name: output.node for output in graph.outputs if output.kind == "output"}
    starts = [outputs[name] for name in graph.tangent_outputs]
    return len(starts) == len(outputs) or any(node is not None and node.meta["val"].ndim for node in starts)


def _with_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
