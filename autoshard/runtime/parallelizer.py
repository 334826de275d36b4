"""One parallelised module: its plan, its parameters, and a program for every way in which it is called."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from autoshard.capture.fake_module import check_parameters
from autoshard.capture.joint import JointGraph
from autoshard.options.target import Target
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.program.build_program import PlannedGraph, build_program
from autoshard.reshard.reductions import DeferredReduction
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.in_place_changes import check_constants
from autoshard.runtime.module_runtime import ADVICE, Runtime, Tangents, wants_gradient
from autoshard.runtime.optimizers import prepare_optimizers, replace_in_optimizers
from autoshard.runtime.rank_agreement import Seeds, check_ranks_agree, from_first_rank, is_first_rank, on_all_ranks
from autoshard.runtime.shards import check_fits, place_buffers, replace_parameters
from autoshard.runtime.step import GradientSums, LocalProgram, Ranks
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


class Call(Protocol):
    """A captured call that a `CallPlanner` made."""

    @property
    def graph(self) -> JointGraph: ...


class CallPlanner(Protocol):
    """Plans the calls of the module; `autoshard.planner.module_planner.ModulePlanner` does, and documents these."""

    requested: Target
    target: Target

    def capture(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        *,
        grad: bool,
        tangents: Tangents,
        dynamic: bool,
        quiet: bool,
        placed: Mapping[str, tuple[Placement, ...]] | None,
        placed_inputs: Mapping[str, tuple[Placement, ...]],
    ) -> Call: ...

    def check(self, call: Any) -> None: ...

    def plan(self, call: Any) -> ShardingPlan: ...

    def apply(self, call: Any, plan: ShardingPlan, *, given: bool) -> PlannedGraph: ...

    def forget(self) -> None: ...


class Parallelizer:
    """One parallelised module: makes the program of every call signature, and places parameters once.

    Args:
        module, device_mesh, plan: as for `autoshard.parallelize`.
        planner: plans the calls of the module.
        part: the number of this module, if it is a part of a larger one whose other parts run on other ranks.
        later: a list to which every backward, once it has the gradients of inputs, appends the function that computes
            and accumulates those of parameters; None to compute them at once.
        sums: the sums of gradients that are reduced by the last of several backwards; None to reduce in each.
        reduced: the time to reduce gradients that are smaller once reduced.
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
        self.part = part
        self.later = later
        self.sums = sums
        self.reduced: DeferredReduction = reduced
        self.module = module
        self.device_mesh = device_mesh
        self.mesh = MeshShape.of(device_mesh)
        self.planner = planner
        self.plan = plan
        self.placed: dict[str, tuple[Placement, ...]] | None = None
        target = planner.target
        self.runtime = Runtime(module, device_mesh, self.prepare, target.inputs, target.dynamic)
        self.seeds = Seeds(device_mesh, self.runtime.hosts)
        self.runtime.planned_outputs = target.output_placements is not None
        self._copy_shares_to_runtime()

    def _copy_shares_to_runtime(self) -> None:
        """Have the runtime split global batches by the shares of the plan."""
        shares = self.planner.requested.shares
        if isinstance(shares, Mapping):
            ((axis, counts),) = shares.items()
            self.runtime.shares = self.mesh.index(axis), tuple(counts)

    def start(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan and place now if there is an example call, else replicate and plan at the first call.

        Raises:
            InputError: other ranks have other options, plans or examples; nothing was changed.
        """
        # Weak: what only the module holds disappears when it is replaced, and what remains has another owner.
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
        """Return the options, plan and example that all ranks must have in common, as texts by their names."""
        target, plan = self.planner.target, self.plan
        settings, options = target.settings, target.options
        wanted = {"inputs": target.inputs, "overlap": options.overlap, "mp_policy": options.mp_policy}
        wanted |= {name: getattr(settings, name) for name in ("recompute", "method", "effort")}
        return {
            "whether an example call is given": "one" if example else "none",
            "the plan that is given": "none" if plan is None else f"one of the graph {plan.fingerprint[:12]}",
            "the decisions of the plan that is given": "none" if plan is None else _digest(plan),
            **{f"the option {name}": str(value) for name, value in wanted.items()},
            "the option compile": str(options.compile),
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
        """Return the graph and the program of one call."""
        device = torch.device(self.device_mesh.device_type)
        check_ranks_agree(
            self.device_mesh,
            self.runtime.describe_new_call(args, kwargs, grad, signature),
            ADVICE,
        )
        call = on_all_ranks(self.device_mesh, lambda: self._capture(args, kwargs, grad, tangents, dynamic))
        graph = call.graph
        wants_all = tangents == "all" or not grad or _differentiates_all(graph)
        general = None if wants_all else self._general_program(graph, args, kwargs, signature, dynamic)
        # Before planning: a module that alternates between two states would be planned at every change.
        program = self._program_of_equal_graph(graph, signature)
        if program is not None:
            return graph, replace(program, general=general)
        plan = self._agree_on_plan(call)
        planned = on_all_ranks(self.device_mesh, lambda: self._apply(call, plan))
        ranks = Ranks(self.device_mesh, device, self.part, self.seeds)
        # Who differentiates more than the loss is given reduced gradients at once.
        sums = self.sums if tangents == "loss" else None
        options = self.planner.target.options
        step, halves = build_program(
            planned,
            ranks.groups,
            device,
            compile=options.compile,
            overlap=options.overlap,
            in_parts=self.later is not None,
            reduced=None if sums is None else self.reduced,
        )
        if self.placed is None:
            self._place(plan)
        else:
            self._place_new(plan)
        self.runtime.record_inputs(step.inputs)
        # Tables of prices are large, and the next call may never need a plan.
        self.planner.forget()
        return planned.graph, LocalProgram(step, halves, ranks, general, self.later, sums)

    def _program_of_equal_graph(self, graph: JointGraph, signature: Hashable) -> LocalProgram | None:
        """Return the program of another state of the module in which the graph was equal, such as before an attribute
        that `forward` sets was set; None where there is none.
        """
        programs = {served.graph.fingerprint: served.program for served in self.runtime.programs_for(signature)}
        if not all(isinstance(parameter, DTensor) for parameter in self.module.parameters()):
            # Those of new modules have to be placed.
            return None
        if programs:
            texts = {"the graph": graph.fingerprint[:12] if graph.fingerprint in programs else "a new one"}
            check_ranks_agree(self.device_mesh, texts, "Have the module in the same state on all ranks.")
        return programs.get(graph.fingerprint)

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
    ) -> Call:
        """Capture a call, and check that the options fit it."""
        if self.planner.target.inputs == "local":
            # No rank knows the numbers of the whole batch.
            args, kwargs = pytree.tree_map_only(torch.Tensor, _without_numbers, (args, kwargs))
        call = self.planner.capture(
            args,
            kwargs,
            grad=grad,
            tangents=tangents,
            dynamic=dynamic,
            quiet=not is_first_rank(self.device_mesh),
            placed=self._current_placements(),
            placed_inputs=self.runtime.input_placements if self.planner.target.inputs == "local" else {},
        )
        check_constants(call.graph, self.module)
        self.planner.check(call)
        return call

    def _current_placements(self) -> dict[str, tuple[Placement, ...]] | None:
        """Return the placements of all that was placed, and of parameters of new modules that have such names."""
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

    def _agree_on_plan(self, call: Call) -> ShardingPlan:
        """Return the plan that the user gave, for the first call; else the first rank's."""
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
            # Only rank 0 plans, and sends the plan as text: a search under a time limit ends differently on every rank.
            text = from_first_rank(self.device_mesh, lambda: self.planner.plan(call).to_json())
            decided = ShardingPlan.from_json(text)
        # Errors are raised on all ranks together: a rank that failed alone would leave the others in a collective.
        on_all_ranks(self.device_mesh, lambda: decided.check(self.mesh, graph.fingerprint, held))
        return decided

    def _apply(self, call: Call, plan: ShardingPlan) -> PlannedGraph:
        planned = self.planner.apply(call, plan, given=plan is self.plan)
        self._copy_shares_to_runtime()
        return planned

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
        # References to old parameters would make `replace_in_optimizers` find an owner of each.
        del named
        replace_parameters(self.module, specs, self.device_mesh)
        for name in plain:
            place_buffers(self.module.get_submodule(name.rpartition(".")[0]), self.device_mesh)
        replace_in_optimizers({old: self.module.get_parameter(name) for old, name in before.items()})


def _digest(plan: ShardingPlan) -> str:
    """Return a digest of the decisions of a plan; the time and place of planning have no part in it."""
    decided = json.dumps([plan.decisions, plan.recomputed], sort_keys=True, default=str)
    return hashlib.blake2b(decided.encode(), digest_size=6).hexdigest()


def _differentiates_all(graph: JointGraph) -> bool:
    """Return True if the program of a graph starts its backward half from every output that has a gradient.

    It starts from scalars alone where there are any, so one that starts from another output starts from all.
    """
    outputs = {output.name: output.node for output in graph.outputs if output.kind == "output"}
    starts = [outputs[name] for name in graph.tangent_outputs]
    return len(starts) == len(outputs) or any(node is not None and node.meta["val"].ndim for node in starts)


def _with_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _without_numbers(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)
