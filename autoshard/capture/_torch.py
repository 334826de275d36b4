"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import _is_all_true as is_all_true  # the check of torch.distributions' validation
from torch import fx, nn
from torch._dynamo.callback import callback_handler  # notifies when Dynamo traces code
from torch._dynamo.exc import UserError  # torch.export's error about unsupported dynamic sizes
from torch._dynamo.source import ConstantSource  # the source of a symbolic size
from torch._functorch import config as functorch_config  # whether the backward half is traced under autocast
from torch._functorch import predispatch  # export's form of torch.vmap and torch.func transforms
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,  # an output that is the gradient of an input
    InputMutationAOTOutput,  # an output that is the new value of a mutated input
    PlainAOTInput,  # an input of the traced graph, by position
    PlainAOTOutput,  # an output of the traced graph, by position
    TangentAOTInput,  # the gradient of an output, where the backward half starts
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # forward and backward in one graph
from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # a Python number of a tensor without numbers is requested
    DynamicOutputShapeException,  # a size depends on numbers that a tensor lacks
    FakeTensor,  # a tensor with a device but without numbers
    FakeTensorMode,
)
from torch._subclasses.functional_tensor import FunctionalTensor  # a tensor while in-place changes are traced away
from torch.autograd import Function
from torch.autograd.function import FunctionMeta  # the metaclass that looks up attributes of functions
from torch.autograd.function import _SingleLevelFunction as FunctionBase  # `apply` of all functions calls its `apply`
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # no public name yet
from torch.export import _trace as export_trace  # tracks assignments to buffers of the root module
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import traceback  # annotations of traced operators, and whether nodes keep them
from torch.fx._lazy_graph_module import (  # code of graphs is generated at their first run
    _LazyGraphModule,
    _use_lazy_graph_module,
)
from torch.fx.experimental.proxy_tensor import (
    get_proxy_mode,  # the mode that traces running code into a graph, if any
    get_proxy_slot,  # the node of that graph whose value is a tensor
)
from torch.fx.experimental.symbolic_shapes import (
    DimDynamic,  # marks a size as a symbol
    GuardOnDataDependentSymNode,  # a branch depends on a tensor without numbers
    ShapeEnv,  # names data-dependent sizes in errors, and holds what is known of dynamic ones
    free_unbacked_symbols,  # the data-dependent sizes in a value
)
from torch.multiprocessing.reductions import StorageWeakRef  # the identity of a tensor's memory
from torch.nn.modules.module import (
    _global_backward_hooks,  # this and the next ones: hooks that run for every module
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    register_module_buffer_registration_hook,
)
from torch.nn.parameter import is_lazy  # parameters without a shape yet
from torch.overrides import _get_current_function_mode_stack as function_modes  # the active TorchFunctionModes
from torch.utils import _pytree as pytree  # nested containers of tensors, as torch.export flattens them
from torch.utils import checkpoint
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator that is called while it is active
    _disable_current_modes,  # hides capture from modes active around it
)
from torch.utils._sympy import functions as symbolic  # torch's functions for the division of sizes
from torch.utils._sympy.numbers import int_oo  # an unlimited size

try:  # runs before and after a checkpoint's function: torch 2.14 calls a function that the older one wraps
    from torch.utils.checkpoint import _checkpoint_without_reentrant_generator_impl as checkpoint_parts
except ImportError:
    from torch.utils.checkpoint import _checkpoint_without_reentrant_generator as checkpoint_parts

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
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
    "free_unbacked_symbols",
    "function_modes",
    "is_all_true",
    "is_lazy",
    "pytree",
    "symbolic",
]

GLOBAL_HOOKS = (_global_forward_pre_hooks, _global_forward_hooks, _global_backward_pre_hooks, _global_backward_hooks)
"""The tables of hooks that run for every module."""


def fake_mode() -> FakeTensorMode:
    """Return a fake tensor mode that accepts real constants held by a module."""
    # With a ShapeEnv, data-dependent sizes are symbols, which errors can quote. Other sizes are plain numbers.
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def without_new_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """Return a context in which operators may create data-dependent numbers that are in no graph."""
    env = mode.shape_env
    return contextlib.nullcontext() if env is None else env.ignore_fresh_unbacked_symbols()


def survey_mode() -> FakeTensorMode:
    """Return a fake tensor mode in which every operator that depends on numbers raises an error."""
    # Without a ShapeEnv, torch cannot name data-dependent sizes, and raises instead.
    return FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which no dispatch mode of the caller (fake, local or other tensors) is active."""
    return _disable_current_modes()


@contextlib.contextmanager
def outside_functions() -> Iterator[None]:
    """Context in which neither dispatch modes nor function modes are active."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


@contextlib.contextmanager
def without_tracebacks() -> Iterator[None]:
    """Context in which torch does not log the errors that it raises on fake tensors."""
    logs = [
        logging.getLogger(name) for name in ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    ]

    def is_wanted(record: logging.LogRecord) -> bool:
        # These records repeat an error that is also raised, and that capture rewrites. DEBUG still shows them.
        failed = record.exc_info is not None or str(record.msg).startswith("Unable to find user code")
        return not failed or logging.getLogger(record.name).isEnabledFor(logging.DEBUG)

    for log in logs:
        log.addFilter(is_wanted)
    try:
        yield
    finally:
        for log in logs:
            log.removeFilter(is_wanted)


# Calls a part of an exported graph with gradients on or off.
WRAP_WITH_GRAD = torch.ops.higher_order.wrap_with_set_grad_enabled
WRAP_WITH_AUTOCAST = torch.ops.higher_order.wrap_with_autocast


def set_gradients(graph: fx.Graph, enabled: bool) -> fx.Node:
    """Add a call that enables or disables gradients for the rest of the graph."""
    # The call that `torch.set_grad_enabled` makes, as a graph function.
    return graph.call_function(torch._C._set_grad_enabled, (enabled,))


class _NodeByNode(nn.Module):
    """A graph called from another one, run node by node so that annotations of its nodes are traced."""

    def __init__(self, inner: fx.GraphModule) -> None:
        super().__init__()
        _run_node_by_node(inner)
        self.inner = inner

    def forward(self, *args: object) -> object:
        return fx.Interpreter(self.inner).run(*args)


def _run_node_by_node(module: fx.GraphModule) -> None:
    """Run subgraphs of a graph node by node, such as parts under autocast or without gradients."""
    for node in module.graph.nodes:
        for source in node.all_input_nodes if node.target in (WRAP_WITH_GRAD, WRAP_WITH_AUTOCAST) else ():
            inner = getattr(module, str(source.target), None) if source.op == "get_attr" else None
            if isinstance(inner, fx.GraphModule):
                setattr(module, str(source.target), _NodeByNode(inner))


def trace_joint(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """Return the functional graph of forward and backward; `meta["desc"]` describes each placeholder and output."""
    with contextlib.ExitStack() as stack:
        # `backward` is called outside autocast, but torch traces the backward half inside it by default.
        if hasattr(functorch_config, "backward_pass_autocast"):
            stack.enter_context(functorch_config.patch(backward_pass_autocast="off"))
        _run_node_by_node(module)
        return aot_export_joint_with_descriptors(stack, module, inputs).graph_module


def unwritten_graphs() -> contextlib.AbstractContextManager[None]:
    """Context in which traced graphs generate code at their first run: most are rewritten, and never run."""
    return _use_lazy_graph_module(True)


def lazy_graph_module(root: nn.Module, graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph that generates its code at the first run.

    Args:
        root: provides the attributes that the graph reads.
        graph: the graph.
    """
    return _LazyGraphModule(root, graph)


@contextlib.contextmanager
def annotate_nodes(annotations: Mapping[str, object]) -> Iterator[None]:
    """Context in which traced nodes have these annotations in `meta["custom"]`."""
    with traceback.annotate(dict(annotations)), traceback.preserve_node_meta():
        yield


def tracing_annotations() -> contextlib.AbstractContextManager[None]:
    """Context in which nodes traced from a graph, derivatives included, inherit the annotations of its nodes."""
    return traceback.preserve_node_meta()


def operator_of(name: str) -> OpOverload:
    """Return an operator of ATen by its name, such as `softmax.int`."""
    packet, _, overload = name.partition(".")
    operator: OpOverload = getattr(getattr(torch.ops.aten, packet), overload or "default")
    return operator


def operators_under_autocast(backend: str) -> frozenset[str]:
    """Return the names of the ATen operators that autocast of a backend, `"CPU"` or `"CUDA"`, intercepts."""
    names = torch._C._dispatch_get_registrations_for_dispatch_key(f"Autocast{backend}")
    return frozenset(name.removeprefix("aten::") for name in names if name.startswith("aten::"))


def below_autocast() -> contextlib.AbstractContextManager[None]:
    """Context in which autocast of the CPU has no effect."""
    # As torch's own kernels do: code inside still sees autocast as enabled.
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    guard: contextlib.AbstractContextManager[None] = torch._C._ExcludeDispatchKeyGuard(keys)
    return guard


def is_persistent(owner: torch.nn.Module, buffer: str) -> bool:
    """Return True if the buffer of this name is in the `state_dict` of its module."""
    return buffer not in owner._non_persistent_buffers_set


def storage_of(tensor: torch.Tensor) -> int:
    """Return an id shared by all views of the same memory, valid while one of them exists."""
    # The id of the storage, not a memory address: fake tensors have none.
    return int(StorageWeakRef(tensor.untyped_storage()).cdata)


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor and its views, as autograd counts them."""
    return tensor._version


def symbolic_integer(
    env: ShapeEnv, value: int, number: int, *, small: bool = False
) -> tuple[int | torch.SymInt, sympy.Symbol]:
    """Return a symbolic integer with the hint `value`, and its symbol.

    Args:
        env: the environment of all symbols.
        value: the integer's value in the example.
        number: the number of integers already made in that environment.
        small: True if the integer may be 0 or 1.
    """
    # The source only names the symbol in torch's guards and messages.
    source = ConstantSource(f"size_{number}")
    symbol = env.create_symbol(value, source, DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=small)
    return env.create_symintnode(symbol, hint=value, source=source), symbol


def symbolic_hint(value: torch.SymInt) -> int:
    """Return the value of a symbolic size in the example."""
    return int(value.node.hint)


def symbolic_conditions(
    mode: FakeTensorMode, symbols: Mapping[Any, sympy.Symbol]
) -> tuple[dict[sympy.Symbol, tuple[int, int | None]], tuple[sympy.Expr, ...]]:
    """Return the ranges of symbols and the conditions, in torch's terms, under which everything run in a mode holds.

    Args:
        mode: the mode of the capture.
        symbols: torch's symbols -> the symbols to use in the ranges.
    """
    env = mode.shape_env
    assert env is not None
    ranges = {}
    for torch_symbol, symbol in symbols.items():
        limits = env.var_to_range[torch_symbol]
        ranges[symbol] = (int(limits.lower), None if limits.upper == int_oo else int(limits.upper))
    return ranges, tuple(env.replace(guard.expr) for guard in env.guards)


_applied: ContextVar[type | None] = ContextVar("autoshard_applied_function", default=None)


def apply_function(function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Apply a `torch.autograd.Function`, also in `applying_functions_by`."""
    token = _applied.set(function)
    try:
        # The patches are on `FunctionBase` and `Function`; torch's own method is on their base class.
        return super(FunctionBase, function).apply(*args, **kwargs)  # type: ignore[misc]
    finally:
        _applied.reset(token)


@contextlib.contextmanager
def applying_functions_by(apply: Callable[..., Any]) -> Iterator[None]:
    """Context in which `function.apply(...)` of a `torch.autograd.Function` becomes `apply(function, ...)`."""

    def enter(function: type[Function], *args: Any, **kwargs: Any) -> Any:
        # A torch.func transform applies its own function instead of this one; that function is seen here, too.
        return apply_function(function, args, kwargs) if transforms_active() else apply(function, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_patch(FunctionBase, "apply", classmethod(apply)))
        # Up to torch 2.13, `Function.apply` is Python code that calls the method of its base class. Later it is the
        # engine's, held by code under other names (`relu = ReLU.apply`), so patching a method has no effect.
        if not isinstance(vars(Function).get("apply"), classmethod):
            stack.enter_context(attribute_patch(Function, "apply", classmethod(enter)))
            stack.enter_context(attribute_patch(FunctionMeta, "__getattribute__", _lookup(apply)))
        yield


def _lookup(apply: Callable[..., Any]) -> Callable[[type, str], Any]:
    """Return an attribute lookup of functions with which the engine's `apply` runs `apply(function, ...)`."""
    stand_ins: dict[type, type[Function]] = {}  # the functions whose attributes the engine gets before forward
    set_ups: dict[type, Any] = {}  # the `setup_context` that it gets after forward

    def look_up(function: type, name: str) -> Any:
        if function is _applied.get():
            return type.__getattribute__(function, name)
        # The engine looks this up first, and no other code does.
        if name == "_backward_cls":
            stand_ins[function] = _stand_in(function, apply)
        if name == "setup_context" and function in set_ups:
            return set_ups.pop(function)
        found = type.__getattribute__(stand_ins.get(function, function), name)
        if name == "forward" and function in stand_ins:
            # While forward runs, other code gets the attributes of the function itself.
            stand_in = stand_ins.pop(function)
            if _has_setup(function):
                return _before(found, lambda: set_ups.update({function: stand_in.setup_context}))
        return found

    return look_up


def _before(run: Callable[..., Any], then: Callable[[], None]) -> Callable[..., Any]:
    """Return a function that runs `run`, and then `then`."""

    def both(*args: Any) -> Any:
        result = run(*args)
        then()
        return result

    return both


def _has_setup(function: type) -> bool:
    return type.__getattribute__(function, "setup_context") is not FunctionBase.setup_context


def _stand_in(function: type, apply: Callable[..., Any]) -> type[Function]:
    """Return a function whose forward is `apply(function, ...)`, and whose backward is that of the result."""
    enabled = torch.is_grad_enabled()
    inputs: list[Any] = []
    edges: list[GradientEdge | None] = []
    without: list[torch.Tensor] = []  # results without a gradient

    def run(*args: Any) -> Any:
        # The engine disables gradients, unseen by modes; modes must not see this context, either.
        with _unseen_gradients(enabled):
            result = apply(function, *args)
        results = result if isinstance(result, tuple) else (result,)
        pairs = [(each, isinstance(each, torch.Tensor) and each.requires_grad) for each in results]
        inputs[:] = args
        with torch._C.DisableTorchFunction():
            # Taken now, because the engine gives the results a new history afterwards.
            edges[:] = [get_gradient_edge(each) if has else None for each, has in pairs]
        without[:] = [each for each in results if isinstance(each, torch.Tensor) and not each.requires_grad]
        return result

    def forward(ctx: Any, *args: Any) -> Any:
        result = run(*args)
        ctx.mark_non_differentiable(*without)
        return result

    def set_up(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*without)

    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        known = [(edge, each) for edge, each in zip(edges, gradients, strict=True) if edge and each is not None]
        wanted = [isinstance(each, torch.Tensor) and each.requires_grad for each in inputs]
        found = iter(
            torch.autograd.grad(
                [edge for edge, _ in known],
                [each for each, is_ in zip(inputs, wanted, strict=True) if is_],
                [gradient for _, gradient in known],
                retain_graph=True,
                create_graph=torch.is_grad_enabled(),
                allow_unused=True,
            )
        )
        return tuple(next(found) if is_ else None for is_ in wanted)

    methods: dict[str, Any] = {"backward": backward}
    methods |= {"forward": run, "setup_context": set_up} if _has_setup(function) else {"forward": forward}
    return type(function.__name__, (Function,), {name: staticmethod(each) for name, each in methods.items()})


@contextlib.contextmanager
def _unseen_gradients(enabled: bool) -> Iterator[None]:
    """Context with gradients on or off, also in traced graphs, hidden from modes."""
    before = torch.is_grad_enabled()
    try:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(enabled)
        yield
    finally:
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(before)


def is_tracing() -> bool:
    """Return True if the operators that run now are traced into a graph."""
    return get_proxy_mode() is not None


def traced_node(tensor: torch.Tensor) -> tuple[fx.Node, torch.nn.Module] | None:
    """Return the node of a tensor in the graph that is being traced, and the module of that graph's constants."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    return None if mode is None or slot is None else (slot.proxy.node, mode.tracer.root)  # type: ignore[union-attr]


def traced_value(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node of a tensor in the functional graph that is being traced, or None outside tracing."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        tensor.sync()  # a view may not have been updated yet after a write to its memory
        tensor = torch._from_functional_tensor(tensor.elem)
    slot = get_proxy_slot(tensor, mode.tracer, None)
    return None if slot is None else slot.proxy.node  # type: ignore[union-attr]


def traced_nodes() -> Iterator[fx.Node]:
    """Yield the nodes of the graph that is being traced, last first."""
    mode = get_proxy_mode()
    if mode is not None:
        yield from reversed(mode.tracer.graph.nodes)


def transforms_active() -> bool:
    """Return True inside a torch.func transform, where tensors are wrapped."""
    return torch._C._are_functorch_transforms_active()


def is_transform(node: fx.Node) -> bool:
    """Return True if a node of an exported graph enters, leaves or wraps for a transform such as `torch.vmap`."""
    return getattr(node.target, "__module__", None) == predispatch.__name__


def functionalizes() -> bool:
    """Return True inside `torch.func.functionalize`."""
    if not transforms_active():
        return False
    interpreter = torch._C._functorch.peek_interpreter_stack()
    return interpreter is not None and interpreter.key() == torch._C._functorch.TransformType.Functionalize


def engine_entry() -> tuple[Any, str]:
    """Return the module and the name of the function with which `backward` and `grad` start the autograd engine."""
    # Both look the function up in this module at every call, so patching it works.
    return torch.autograd, "_engine_run_backward"


@contextlib.contextmanager
def attribute_patch(owner: Any, name: str, value: object) -> Iterator[None]:
    """Context in which `owner` has `value` as its own attribute `name`."""
    missing = object()  # an attribute that `owner` inherits is deleted again afterwards
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
def as_if_exporting() -> Iterator[None]:
    """Context in which `torch.compiler` tells code that it is being exported."""
    with (
        attribute_patch(torch.compiler, "_is_compiling_flag", True),
        attribute_patch(torch.compiler, "_is_exporting_flag", True),
    ):
        yield


@contextlib.contextmanager
def around_dynamo(begin: Callable[[], None], end: Callable[[], None]) -> Iterator[None]:
    """Context in which `begin` is called before Dynamo traces the code of a branch or a loop, and `end` after."""

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
def without_checkpoints(region: Callable[[bool], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
    """Context in which non-reentrant checkpoints only run their function, in a context.

    Args:
        region: makes the context, given True if a policy of the checkpoint decides what is saved (`context_fn`).
    """

    signature = inspect.signature(checkpoint_parts)  # which options are passed by position depends on the release

    # A plan recomputes, so what a checkpoint adds (random states, saved-tensor hooks) is omitted.
    def plain(*args: Any, **kwargs: Any) -> Iterator[None]:
        context_fn = signature.bind(*args, **kwargs).arguments.get("context_fn", checkpoint.noop_context_fn)
        with region(context_fn is not checkpoint.noop_context_fn):
            yield

    with attribute_patch(checkpoint, checkpoint_parts.__name__, plain):
        yield


@contextlib.contextmanager
def without_root_buffers() -> Iterator[None]:
    """Context in which torch.export does not copy values that `forward` assigns to buffers of the root module."""
    # torch.export removes the handle of its hook, so a hook that does nothing is registered.
    follow_none = lambda *_: register_module_buffer_registration_hook(lambda *_: None)  # noqa: E731
    with attribute_patch(export_trace, "register_buffer_assignment_hook", follow_none):
        yield
