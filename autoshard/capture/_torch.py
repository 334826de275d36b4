"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import fx
from torch._dynamo.callback import callback_handler  # tells when Dynamo reads code
from torch._dynamo.exc import UserError  # what torch.export says of dynamic sizes that it cannot have
from torch._dynamo.source import ConstantSource  # where a symbolic size comes from
from torch._functorch import config as functorch_config  # whether autocast goes on in the backward half
from torch._functorch import predispatch  # how export writes down torch.vmap and transforms of torch.func
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,  # an output that is a gradient, and of which input
    InputMutationAOTOutput,  # an output that is the new value of a mutated input
    PlainAOTInput,  # an input of the traced graph, by position
    PlainAOTOutput,  # an output of the traced graph, by position
    TangentAOTInput,  # the gradient that the backward half starts from, and of which output
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # forward and backward in one graph
from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # a Python number is asked of a tensor that has none
    DynamicOutputShapeException,  # a result whose size depends on numbers is asked of tensors that have none
    FakeTensor,  # a tensor with a device, and no numbers
    FakeTensorMode,
)
from torch.autograd.function import _SingleLevelFunction as FunctionBase  # whose `apply` all functions end up in
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # no public name yet
from torch.export import _trace as export_trace  # which follows assignments to buffers of the root module
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import traceback  # what is said of the operators that are traced, and whether nodes keep it
from torch.fx._lazy_graph_module import _use_lazy_graph_module  # code of graphs is written when they first run
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # what writes a graph while code runs, if anything does
    get_proxy_slot,  # the node of that graph that a tensor is the value of
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # that a size stays a symbol
    GuardOnDataDependentSymNode,  # the way at a branch is asked of a tensor that has no numbers
    ShapeEnv,  # names sizes that depend on data, in errors, and holds what is known of dynamic ones
    free_unbacked_symbols,  # the sizes in a value that depend on data
)
from torch.multiprocessing.reductions import StorageWeakRef  # the identity of a tensor's memory
from torch.nn.modules.module import (
    _global_backward_hooks,  # the hooks that run for every module, here and in the next ones
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_buffer_registration_hook,
)
from torch.nn.parameter import is_lazy  # parameters whose shape is not known yet
from torch.overrides import _get_current_function_mode_stack as function_modes  # the active TorchFunctionModes
from torch.utils import _pytree as pytree  # nested containers of tensors, as torch.export sees them
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator that is called while it is active
    _disable_current_modes,  # capture is not seen by modes active around it
)
from torch.utils._sympy import functions as symbolic  # what torch writes where sizes are divided
from torch.utils._sympy.numbers import int_oo  # no limit of a size
from torch.utils.checkpoint import (
    _checkpoint_without_reentrant_generator,  # what a checkpoint does before its function, and after it
)

__all__ = [
    "GLOBAL_HOOKS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionBase",
    "GradAOTOutput",
    "GuardOnDataDependentSymNode",
    "InputKind",
    "InputMutationAOTOutput",
    "OpOverload",
    "PlainAOTInput",
    "PlainAOTOutput",
    "StridedShard",
    "TangentAOTInput",
    "TensorArgument",
    "TorchDispatchMode",
    "UserError",
    "annotate_nodes",
    "apply_function",
    "around_dynamo",
    "attribute_patch",
    "below_autocast",
    "engine_entry",
    "fake_mode",
    "free_unbacked_symbols",
    "function_modes",
    "functionalizes",
    "is_lazy",
    "is_persistent",
    "is_tracing",
    "is_transform",
    "operator_of",
    "operators_under_autocast",
    "outside_functions",
    "outside_modes",
    "pytree",
    "storage_of",
    "survey_mode",
    "symbolic",
    "symbolic_conditions",
    "symbolic_hint",
    "symbolic_integer",
    "trace_joint",
    "traced_node",
    "tracing_annotations",
    "transforms_active",
    "unwritten_graphs",
    "version_of",
    "without_checkpoints",
    "without_root_buffers",
    "without_tracebacks",
]

GLOBAL_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks)
"""The tables of hooks that run for every module."""


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that accepts the real constants a module holds."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def survey_mode() -> FakeTensorMode:
    """A fake tensor mode in which whatever depends on numbers raises an error, and names no size."""
    return FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which no dispatch mode of the caller (fake, local or other tensors) is active."""
    return _disable_current_modes()


@contextlib.contextmanager
def outside_functions() -> Iterator[None]:
    """Context in which no mode at all is active, be it of dispatch or of functions."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Context in which torch does not log what fails on fake tensors: it raises it, too."""
    logs = [
        logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    ]

    def is_wanted(record: logging.LogRecord) -> bool:
        failed = record.exc_info is not None or str(record.msg).startswith("Unable to find user code")
        return not failed or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)

    for log in logs:
        log.addFilter(is_wanted)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_wanted)


def trace_joint(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The functional graph of forward and backward, each placeholder and output described in `meta["desc"]`.

    The backward half is what a call of `backward` outside of autocast runs.
    """
    with contextlib.ExitStack() as stack:
        if hasattr(functorch_config, "backward_pass_autocast"):
            stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        return aot_export_joint_with_descriptors(stack, module, inputs).graph_module


def unwritten_graphs() -> contextlib.AbstractContextManager[None]:
    """Context in which graphs that are traced get no code before they run: most are changed, and never run by it."""
    return _use_lazy_graph_module(True)


@contextlib.contextmanager
def annotate_nodes(annotations: Mapping[str, object]) -> Iterator[None]:
    """Context in which nodes that are traced have these annotations in `meta["custom"]`."""
    with traceback.annotate(dict(annotations)), traceback.preserve_node_meta():
        yield


def tracing_annotations() -> contextlib.AbstractContextManager[None]:
    """Context in which what is traced of a graph has the annotations of its nodes, derivatives included."""
    return traceback.preserve_node_meta()


def operator_of(name: str) -> OpOverload:
    """An operator of ATen by its name, such as `softmax.int`."""
    packet, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def operators_under_autocast(backend: str) -> frozenset[str]:
    """The names of the operators of ATen before which autocast of a backend, `"CPU"` or `"CUDA"`, does something."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{backend}")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def below_autocast() -> contextlib.AbstractContextManager[None]:
    """Context in which autocast of the CPU does nothing."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def is_persistent(owner: torch.nn.Module, buffer: str) -> bool:
    """Whether the `state_dict` of a module has its buffer of this name."""
    return buffer not in owner._non_persistent_buffers_set


def storage_of(tensor: torch.Tensor) -> int:
    """A number that tensors have in common which look at the same memory, as long as one of them lives."""
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def version_of(tensor: torch.Tensor) -> int:
    """How often the numbers of a tensor were changed in place."""
    return tensor._version  # by autograd, views included


def symbolic_integer(
    env: ShapeEnv, value: int, number: int, *, small: bool = False
) -> tuple[int | torch.SymInt, sympy.Symbol]:
    """A symbolic integer that is `value` where it has to be a number, and its symbol.

    Args:
        env: what knows all of them.
        value: of the integer.
        number: how many were made in that environment before.
        small: whether it may be 0 or 1 elsewhere, or is one here.
    """
    source = ConstantSource(f"size_{number}")
    own = env.create_symbol(value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=small)
    return env.create_symintnode(own, hint=value, source=source), own


def symbolic_hint(value: torch.SymInt) -> int:
    """The number that a symbolic size has in the example."""
    return int(value.node.hint)


def symbolic_conditions(
    mode: FakeTensorMode, symbols: Mapping[Any, sympy.Symbol]
) -> tuple[dict[sympy.Symbol, tuple[int, int | None]], tuple[sympy.Expr, ...]]:
    """Under what ranges, and what conditions in torch's own terms, all that ran in a mode would go the same way."""
    env = mode.shape_env
    assert env is not None
    ranges = {}
    for own, ours in symbols.items():
        limits = env.var_to_range[own]
        ranges[ours] = (int(limits.lower), None if limits.upper == int_oo else int(limits.upper))
    return ranges, tuple(env.replace(guard.expr) for guard in env.guards)


def apply_function(function: type[torch.autograd.Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call a function with its own backward, whatever `FunctionBase.apply` is at the moment."""
    return super(FunctionBase, function).apply(*args, **kwargs)  # type: ignore[misc]


def is_tracing() -> bool:
    """Whether the operators that run now are written into a graph."""
    return get_proxy_mode() is not None


def traced_node(tensor: torch.Tensor) -> tuple[fx.Node, torch.nn.Module] | None:
    """The node that a tensor is the value of in the graph that is being written, and the module of its constants."""
    mode = get_proxy_mode()
    found = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if mode is None or found is None else (found.proxy.node, mode.tracer.root)  # type: ignore[union-attr]


def transforms_active() -> bool:
    """Whether code runs inside of a transform of torch.func, on tensors that are wrapped for it."""
    return torch._C._are_functorch_transforms_active()


def is_transform(node: fx.Node) -> bool:
    """Whether a node of an exported graph enters, leaves or wraps for a transform such as `torch.vmap`."""
    return getattr(node.target, "__module__", None) == predispatch.__name__


def functionalizes() -> bool:
    """Whether code runs inside of `torch.func.functionalize`."""
    if not torch._C._are_functorch_transforms_active():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Functionalize


def engine_entry() -> tuple[Any, str]:
    """Module and name of the function by which `backward` and `grad` start the autograd engine."""
    return torch.autograd, "_engine_run_backward"


@contextlib.contextmanager
def attribute_patch(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which `owner` has another attribute of its own."""
    missing = object()
    before = vars(owner).get(name, missing)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


@contextlib.contextmanager
def around_dynamo(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Context in which `begin` is called before Dynamo reads code, as that of a branch or a loop, and `end` after."""

    def start(_: object) -> None:
        begin()

    def finish(_: object) -> None:
        end()

    callback_handler.register_start_callback(start)
    callback_handler.register_end_callback(finish)
    try:
        yield
    finally:
        callback_handler.remove_start_callback(start)
        callback_handler.remove_end_callback(finish)


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Context in which checkpoints that are not reentrant run their function and nothing else."""

    def plain(*_: object, **__: object) -> Iterator[None]:
        yield

    with attribute_patch(checkpoint, _checkpoint_without_reentrant_generator.__name__, plain):
        yield


@contextlib.contextmanager
def without_root_buffers() -> Iterator[None]:
    """Context in which torch.export does not write into the buffers of a root module what `forward` sets them to."""

    def follow_none(*_: object) -> Any:
        return register_module_buffer_registration_hook(lambda *_: None)

    with attribute_patch(export_trace, "register_buffer_assignment_hook", follow_none):
        yield
