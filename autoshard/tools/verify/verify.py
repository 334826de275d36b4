"""`verify`: run the programs of a plan on all ranks in this process, and compare with the module on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree

from autoshard import AutoshardError, InputError, MeshShape, PipelinePlan, PlanError, ShardingPlan, check_options
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph
from autoshard.capture.nodes import is_random
from autoshard.capture.python.fake_module import copy_fault
from autoshard.operators.attention.attention_operator import operators as attentions
from autoshard.options import OptionKeywords
from autoshard.options.target import Target
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.explorer import Explorer
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planning import CapturedCall
from autoshard.program.build_program import PlannedGraph
from autoshard.runtime.arguments import check_module, check_not_parallelized
from autoshard.tools.examples import check_factory_result
from autoshard.tools.verify.all_ranks import HeldTensor, TrainingOnAllRanks
from autoshard.tools.verify.differences import difference_scales, relative_difference
from autoshard.tools.verify.float64 import Float64Mode, default_float64, widen_module, widen_tensors
from autoshard.tools.verify.one_device import TrainingOnOneDevice
from autoshard.tools.verify.operator_faults import Tensors, operator_faults, user_rule_findings
from autoshard.tools.verify.report import KINDS, TOLERANCE, Difference, VerifyReport

Factory = Callable[[], Any]
Example = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

LEARNING_RATE = 0.01
# The dtypes that round more coarsely than numbers are compared.
_EPSILON = 1e-12
_MODULES = 3


def verify(
    model_or_factory: nn.Module | Factory,
    mesh: DeviceMesh | Mapping[str, int],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    plan: ShardingPlan | None = None,
    steps: int = 3,
    **options: Unpack[OptionKeywords],
) -> VerifyReport:
    """Train with the programs of a plan on all ranks of a mesh, and compare every number with one device.

    All ranks run in this process, on the CPU, operator by operator, in float64. No GPU and no process group is needed,
    and nothing is changed: a model is copied. The optimizer is stochastic gradient descent with a fixed rate. Random
    operators are refused: the ranks draw other numbers than one device. The report says how many operators were split
    and how many collectives ran; a plan with none of both proves nothing, and the report is not `ok`.

    Args:
        model_or_factory: the model, in training or evaluation mode, with real parameters; or a function without
            arguments that returns `(model, args, kwargs)`, `(model, args)` or `(model, kwargs)`, at sizes that are
            quick to compute.
        mesh: a `DeviceMesh`, or axis sizes such as `{"dp": 2, "tp": 2}`.
        args, kwargs: of an example call, tensors of global shape; not with a function. Floating tensors are converted
            to float64.
        plan: the plan to verify, of this model at these shapes; by default the one that is made for the model in
            float64, with these options; where that one splits nothing, as at small sizes, one in which all parameters
            are forced to be sharded. A plan of the model in another dtype fits as long as the model has no casts.
        steps: training steps, at least 1.
        **options: the fields of `autoshard.Options`, without `mp_policy`, `shares`, `compile` and
            `pipeline`; with a plan, those that it was made with.

    Returns:
        The report. That numbers differ is part of it, not an error: `report.raise_if_wrong()` raises it.

    Raises:
        InputError: the model draws random numbers, has parameters on the meta device or cannot be copied, or the
            arguments are not valid.
        PlanError: the plan is of another model or mesh, or of a pipeline, or has unequal shares.
        CaptureError, HintError, BudgetError, MeshError, RuleError, TypeError: as for `autoshard.plan`.
    """
    shape = MeshShape.of(mesh)
    collected = check_options("verify", mesh, **options)
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise InputError(f"steps={steps!r}: it is a number of training steps, at least 1.")
    _check_plan_kind(shape, collected.pipeline.axis, plan)
    module, args, kwargs = _float64_example(model_or_factory, args, kwargs)
    target = Target.of(collected, mesh.device_type if isinstance(mesh, DeviceMesh) else None).on_mesh(shape, plan)
    planner = ModulePlanner(module, shape, target)
    with Float64Mode(), torch.autocast("cpu", enabled=False):
        bound = BoundCall.of(module, args, kwargs, torch.is_grad_enabled())
        call = planner.capture(bound, logits_room=planner.logits_room)
        _check_not_random(call.graph)
        if plan is None:
            plan = _plan_that_splits(planner, call)
        else:
            _check_plan(plan, shape, call.graph)
        call = call.form_of(plan)
    with default_float64(), torch.autocast("cpu", enabled=False):
        return _Verification(bound, planner, call, plan).report(steps)


class _Verification:
    """The comparison of one plan."""

    def __init__(self, bound: BoundCall, planner: ModulePlanner, call: CapturedCall, plan: ShardingPlan) -> None:
        module = bound.module
        self.model = type(module).__name__
        self.planner = planner
        self.call = call
        self.plan = plan
        self.device = TrainingOnOneDevice(bound, call.graph)
        self.tangents = _tangents(call.graph)
        self.collectives = 0  # of a step, once its program is made
        named: dict[str, Mapping[str, Tensor]] = {
            "parameter": dict(module.named_parameters(remove_duplicate=False)),
            "buffer": dict(module.named_buffers(remove_duplicate=False)),
            "input": self.device.inputs,
            "tangent": self.tangents,
        }
        # Copies: the module on one device trains.
        self.tensors: Tensors = {
            (item.kind, item.name): named[item.kind][item.name].detach().clone()
            for item in call.graph.inputs
            if item.kind in named
        }

    @property
    def losses(self) -> frozenset[str]:
        """Names of the scalar outputs that are differentiated."""
        return frozenset(name for name, tangent in self.tangents.items() if tangent.ndim == 0)

    def report(self, steps: int) -> VerifyReport:
        """Check rules, train on both sides, and look for operators to blame if anything differs."""
        rules = tuple(user_rule_findings(self.call.graph, self.tensors))
        with Float64Mode():
            # A plan that was given may be edited, so its errors are not those of rules.
            planned = self.planner.apply(self.call, self.plan, given=True)
        failure = ""
        differences: tuple[Difference, ...] = ()
        try:
            differences = self._differences(planned, steps)
        except (AutoshardError, RuntimeError, ValueError, IndexError, AssertionError) as error:
            # A wrong rule may give shards that do not fit together.
            failure = f"{type(error).__name__}: {error}"
            faults = operator_faults(planned.flow, self.tensors)
            if not (rules or faults):
                raise
        else:
            wrong = any(difference.relative > TOLERANCE for difference in differences)
            faults = operator_faults(planned.flow, self.tensors) if wrong else []
        return VerifyReport(
            self.model,
            self.plan,
            steps,
            differences,
            tuple(faults),
            rules,
            failure,
            tuple(_low_precision_notes(self.call.graph)),
            _split_operators(planned),
            len(planned.flow.rules.operators),
            self.collectives,
        )

    def _differences(self, planned: PlannedGraph, steps: int) -> tuple[Difference, ...]:
        ranks = TrainingOnAllRanks(planned, self.tensors)
        self.collectives = ranks.collectives
        worst: dict[tuple[str, str], float] = {}

        def compare(kind: str, held: Mapping[str, HeldTensor], expected: Mapping[str, Tensor]) -> None:
            scales = difference_scales(expected)
            for name, whole in expected.items():
                pairs = ranks.beside(held[name], whole) if name in held else ()
                key = "loss" if kind == "output" and name in self.losses else kind, name
                worst[key] = max(relative_difference(pairs, scales[name]), worst.get(key, 0.0))

        for _ in range(steps):
            outputs, gradients = ranks.run(self.device.inputs, self.tangents, LEARNING_RATE)
            expected_outputs, expected_gradients = self.device.run(self.tangents, LEARNING_RATE)
            compare("output", outputs, expected_outputs)
            compare("gradient", gradients, expected_gradients)
        for kind, named in (
            ("parameter", self.device.module.named_parameters()),
            ("buffer", self.device.module.named_buffers()),
        ):
            held = ranks.tensors(kind)
            # Other tensors have no part in the step.
            compare(kind, held, {name: tensor for name, tensor in named if name in held})
        found = (Difference(kind, name, value) for (kind, name), value in worst.items())
        return tuple(sorted(found, key=lambda each: (KINDS.index(each.kind), -each.relative)))


def _plan_that_splits(planner: ModulePlanner, call: CapturedCall) -> ShardingPlan:
    """Return the plan of a call; where it splits nothing, as that of a small model may, the one that shards most."""
    plan = planner.plan(call)
    # On one device, every operator is whole whatever the plan is.
    if planner.mesh.size == 1 or (plan.collectives and any(choice.strategy != "whole" for choice in plan.choices)):
        return plan
    return Explorer(call.planner_of(planner.target), may_rerun=False).leanest()


def _split_operators(planned: PlannedGraph) -> int:
    """Return how many operators the axes of the mesh split."""
    choices = (planned.flow.decisions.choices[node.name] for node in planned.flow.rules.operators)
    return sum(any(choice != WHOLE for choice in each) for each in choices)


def _check_plan_kind(mesh: MeshShape, pipeline_axis: str | None, plan: object) -> None:
    """Raise a `PlanError` for a pipeline, and for plans that are of another kind than the programs that can run."""
    if pipeline_axis is not None or isinstance(plan, PipelinePlan):
        axis = "" if pipeline_axis is None else f" (its axis {pipeline_axis!r})"
        raise PlanError(
            f"verify runs the program of one step on all ranks, and the mesh {mesh} or the plan is of a pipeline"
            f"{axis}, whose stages have programs of their own. Verify the model on the other axes of the mesh."
        )
    if plan is None:
        return
    if not isinstance(plan, ShardingPlan):
        raise PlanError(
            f"plan must be a ShardingPlan, got {type(plan).__name__}: read a file with autoshard.ShardingPlan.load."
        )
    if plan.shares:
        raise PlanError(
            f"the plan has the shares {plan.shares}, and verify runs ranks that take equal parts: plan without shares."
        )


def _check_plan(plan: ShardingPlan, mesh: MeshShape, graph: JointGraph) -> None:
    """Raise a `PlanError` unless the plan is for this mesh and for parameters of these names and shapes."""
    shapes = {
        name: tuple(item.node.meta["val"].shape)
        for item in graph.inputs
        if item.kind in ("parameter", "buffer")
        for name in graph.aliases[item.name]
    }
    # The fingerprint covers dtypes: those of the model may not be float64. That the decisions fit is checked later.
    plan.check(mesh, plan.fingerprint, shapes)


def _float64_example(
    model_or_factory: nn.Module | Factory, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None
) -> Example:
    """Return a module of our own in float64, and the arguments of a call."""
    if isinstance(model_or_factory, nn.Module):
        args, kwargs = _check_call(args, kwargs)
        check_module(model_or_factory)
        check_not_parallelized(model_or_factory)
        try:
            module = copy.deepcopy(model_or_factory)
        except Exception as error:  # whatever an attribute raises
            raise InputError(
                f"verify trains a copy of the model, and it cannot be copied: {copy_fault(model_or_factory, error)}. "
                "Pass a function that makes the model and returns (model, args, kwargs)."
            ) from error
    elif callable(model_or_factory):
        if args or kwargs:
            raise InputError(
                "args and kwargs go with a model, and verify got a function: return (model, args, kwargs) from it."
            )
        module, args, kwargs = check_factory_result(model_or_factory(), "the function")
        check_module(module)
        check_not_parallelized(module)
    else:
        raise InputError(
            f"verify takes a torch.nn.Module, or a function that returns (model, args, kwargs), got "
            f"{type(model_or_factory).__name__}."
        )
    named = (*module.named_parameters(), *module.named_buffers())
    missing = [name for name, tensor in named if tensor.is_meta]
    leaves = pytree.tree_leaves((args, kwargs))
    missing += [
        f"an input of shape {tuple(leaf.shape)}" for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_meta
    ]
    if missing:
        raise InputError(
            f"{missing[0]} is on the meta device, and verify compares numbers: pass a model and inputs with real ones, "
            "or a function that makes them, at sizes that are quick to compute."
        )
    widen_module(module)
    return module, *widen_tensors((args, kwargs))


def _check_call(args: object, kwargs: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call; raise an `InputError` unless they are a tuple and a mapping."""
    if isinstance(args, Tensor):
        raise InputError("args is a tuple of positional arguments, got a Tensor: for one argument, write args=(x,).")
    if not isinstance(args, (tuple, list)) or not (kwargs is None or isinstance(kwargs, Mapping)):
        raise InputError(
            f"args is a tuple of positional arguments and kwargs a mapping from names to values, got "
            f"{type(args).__name__} and {type(kwargs).__name__}."
        )
    return tuple(args), dict(kwargs or {})


def _check_not_random(graph: JointGraph) -> None:
    """Raise an `InputError` if the step draws random numbers."""
    seed = attentions.attention_seed.default
    random = [node for node in graph.graph.nodes if is_random(node) or node.target is seed]
    if random:
        paths = dict.fromkeys(graph.module_path(node) or "the root module" for node in random)
        more = f" and {len(paths) - _MODULES} more" if len(paths) > _MODULES else ""
        names = ", ".join([*paths][:_MODULES]) + more
        raise InputError(
            f"verify compares numbers, and random ones are drawn in {names} ({random[0].target}): shards draw other "
            "numbers than one device. Set the probabilities of dropout to 0, or call model.eval(), and verify again; "
            "autoshard.patterns.check compares what a random operator draws by its distribution."
        )


def _tangents(graph: JointGraph) -> dict[str, Tensor]:
    """Return the gradients of the differentiated outputs, by name: 1 of a scalar, normal numbers of other outputs."""
    generator = torch.Generator().manual_seed(0)
    tangents = {}
    for item in graph.inputs:
        if item.kind == "tangent":
            val = item.node.meta["val"]
            ones = torch.ones((), dtype=val.dtype)
            shape = tuple(val.shape)
            tangents[item.name] = torch.randn(shape, generator=generator, dtype=val.dtype) if shape else ones
    return tangents


def _low_precision_notes(graph: JointGraph) -> Iterator[str]:
    """Yield a note for every dtype below float64 that operators compute in, whose rounding may be compared."""
    modules: dict[torch.dtype, dict[str, None]] = {}
    for node in graph.graph.nodes:
        val = node.meta.get("val") if node.op == "call_function" else None
        if isinstance(val, Tensor) and val.is_floating_point() and torch.finfo(val.dtype).eps > _EPSILON:
            modules.setdefault(val.dtype, {})[graph.module_path(node) or "the root module"] = None
    for dtype, paths in modules.items():
        names = ", ".join([*paths][:_MODULES]) + (f" and {len(paths) - _MODULES} more" if len(paths) > _MODULES else "")
        yield (
            f"{names} computes in {dtype} even in a float64 model: shards may round otherwise there, and such "
            "differences are no fault. Verify without these casts."
        )
