"""Code of `forward` that acts on gradients: during export, it becomes calls in the graph or is refused.

Such code is functions with their own backward, hooks on tensors, and gradients computed in `forward`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode, handle_torch_function
from torch.utils.checkpoint import CheckpointFunction

from autoshard.capture._torch import (
    apply_function,
    applying_functions_by,
    attribute_patch,
    engine_entry,
    function_modes,
    functionalizes,
    is_tracing,
    pytree,
    storage_of,
    transforms_active,
    version_of,
    without_checkpoints,
)
from autoshard.capture.capture_errors import running_line
from autoshard.capture.dense import dense_fault, is_dense
from autoshard.capture.marks import CHECKPOINT, Saving
from autoshard.capture.python.called_code import (
    SET_GRAD,
    FreeTensors,
    PythonCall,
    PythonCalls,
    TensorScope,
    collect_calls,
    sizes_of,
    tensors_of,
)
from autoshard.capture.python.mutations import Mutations
from autoshard.errors import CaptureError, warn_caller

Hook = Callable[..., Any]


class HookHandle:
    """Handle of a hook: `remove` removes the hook, as torch's handle does."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self) -> None:
        """Remove the hook."""
        self.removed = True


def hook_tensor(calls: PythonCalls, tensor: Tensor, hook: Hook) -> HookHandle:
    """Add `tensor.register_hook(hook)` to the graph of a module that is exported."""
    # register_multi_grad_hook sets a hook from torch.autograd.graph on each of its tensors.
    if getattr(hook, "__globals__", None) is vars(torch.autograd.graph):
        raise CaptureError(
            f"{running_line()} sets one hook for the gradients of several tensors, which changes none of them: it "
            "would run while the step is captured, without numbers, and not in the steps themselves. Set a hook on "
            "each tensor to change its gradient, tensor.register_hook(hook), and take what is to be looked at from "
            "torch.autograd.grad."
        )
    if not tensor.requires_grad:
        tensor.register_hook(hook)  # raises torch's own error
    return _set_hook(calls, "register_hook", tensor, hook, _identity)


class GradientNode:
    """The `grad_fn` that code sees during export: hooks on that of a custom function become calls."""

    def __init__(self, calls: PythonCalls, tensor: Tensor, node: Any) -> None:
        self._calls, self._tensor, self._node = calls, tensor, node

    def __getattr__(self, name: str) -> Any:
        return getattr(self._node, name)

    def register_hook(self, hook: Hook) -> HookHandle:
        """Call `hook` with the gradients of the function's inputs and outputs."""
        return self._set("register_hook", hook)

    def register_prehook(self, hook: Hook) -> HookHandle:
        """Call `hook` with the gradients of the function's outputs."""
        return self._set("register_prehook", hook)

    def _set(self, method: str, hook: Hook) -> HookHandle:
        # The traced graph may use other operators than torch's backward, so its nodes have no counterpart.
        if not isinstance(self._node, BackwardCFunction):
            raise CaptureError(
                f"{running_line()} sets a hook on {self._node.name()}, a step of torch's own backward, which the graph "
                "need not have. Set it on the tensor: tensor.register_hook(hook)."
            )
        return _set_hook(self._calls, method, self._tensor, hook, _grad_fn)


def _set_hook(
    calls: PythonCalls, method: str, tensor: Tensor, hook: Hook, owner: Callable[[Tensor], Any]
) -> HookHandle:
    """Add a call that sets a hook to the graph; `owner` returns the tensor or node on which the hook is set."""
    handle = HookHandle()

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        run = _in_scope(hook, scope)
        # With `FreeTensors`, the call is only tried, to find the tensors that the hook reads.
        if isinstance(scope, FreeTensors):
            if owner is _identity:
                _try_hook(run, tensors[0], call.where, calls.mutations)
        elif not handle.removed:
            getattr(owner(tensors[0]), method)(run)
        return []

    text, of_node = _hook_text(calls, method, hook), owner is _grad_fn
    call = PythonCall(method, text, body, has_effect=True, history=1, shares_state=of_node)
    calls.add(call, [tensor])
    return handle


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _grad_fn(tensor: Tensor) -> Any:
    return tensor.grad_fn


def _try_hook(run: Hook, tensor: Tensor, where: str, mutations: Mutations) -> None:
    """Run a hook to find the tensors that it reads, and warn if it changes no gradient."""
    gradient = torch.empty_like(tensor, requires_grad=False)
    version = version_of(gradient)
    with mutations.refusing(where):
        result = run(gradient)
    if result is None and version_of(gradient) == version:
        warn_caller(
            f"the hook of {where} returns None: it runs while the step is captured, without numbers, and not in the "
            "steps themselves.",
        )


def _hook_text(calls: PythonCalls, method: str, hook: Hook) -> str:
    """Return the text of a hook in fingerprints."""
    # Fingerprints of all ranks have to be equal, so texts may not contain addresses. Plain functions without closures
    # or defaults are identified by source line. All others may read anything: each has a unique number.
    if isinstance(hook, FunctionType) and not (hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__):
        return f"{method} {hook.__module__}.{hook.__qualname__}:{hook.__code__.co_firstlineno}"
    return f"{method} #{len(calls.calls)}"


def set_requires_grad(calls: PythonCalls, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """Add `tensor.requires_grad_(requires_grad)` to the graph of a module that is exported.

    Raises:
        CaptureError: the tensor is a parameter or buffer, whose `requires_grad` must not change in a call.
    """
    if tensor.requires_grad == requires_grad:
        return tensor
    if calls.is_module_tensor(tensor):
        raise CaptureError(
            f"{running_line()} sets requires_grad of a parameter or buffer in forward, and a plan counts on what "
            "it was before. Set it before parallelizing, or use the detached tensor."
        )

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        tensors[0].requires_grad_(requires_grad)
        return []

    tensor.requires_grad_(requires_grad)
    call = PythonCall("requires_grad_", f"requires_grad_({requires_grad})", body, has_effect=True, history=1)
    calls.add(call, [tensor])
    return tensor


def take_gradients(
    calls: PythonCalls,
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    **options: Any,
) -> tuple[Tensor | None, ...]:
    """Add a call of `torch.autograd.grad` to the graph of a module that is exported."""
    sources, targets = _as_list(outputs), _as_list(inputs)
    seeds = _as_list(grad_outputs) if grad_outputs is not None else [None] * len(sources)
    if not all(isinstance(value, Tensor) for value in (*sources, *targets)):
        raise CaptureError(
            f"{running_line()} takes gradients of edges of the autograd graph, which the captured graph need not have. "
            "Pass tensors to torch.autograd.grad."
        )
    has_gradient: list[bool] = []  # by target; filled when the call is tried

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        operands = iter(tensors)
        results = torch.autograd.grad(
            [next(operands) for _ in sources],
            [next(operands) for _ in targets],
            [None if seed is None else next(operands) for seed in seeds],
            retain_graph=True,  # the traced graph runs its own backward later
            create_graph=create_graph,
            **options,
        )
        has_gradient[:] = [result is not None for result in results]
        return tensors_of(results)

    def alone(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        # A gradient has the shape and dtype of its target.
        operands = tensors[len(sources) : len(sources) + len(targets)]
        results = [tensor.clone() if create_graph else tensor.detach().clone() for tensor in operands]
        return [result for result, exists in zip(results, has_gradient, strict=True) if exists]

    text = f"grad {len(sources)} {len(targets)} {[seed is None for seed in seeds]} {create_graph} {options}"
    call = PythonCall("grad", text, body, history=len(sources) + len(targets), alone=alone)
    results = iter(calls.add(call, tensors_of([sources, targets, seeds])))
    return tuple(next(results) if exists else None for exists in has_gradient)


def _as_list(values: Any) -> list[Any]:
    return list(values) if isinstance(values, Sequence) else [values]


# Placeholder of a tensor in the result of a function.
_TENSOR = object()

# Arguments identified by their `repr`.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


def call_function(
    calls: PythonCalls, function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a custom function while its caller is exported, and return its result."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    returned: list[Any] = []

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        remaining_tensors, remaining_sizes = iter(tensors), iter(sizes)
        operands = [
            next(remaining_tensors)
            if isinstance(leaf, Tensor)
            else next(remaining_sizes)
            if isinstance(leaf, torch.SymInt)
            else leaf
            for leaf in leaves
        ]
        call_args, call_kwargs = structure.unflatten(operands)
        with scope:
            result = apply_function(_scoped_function(function, scope), call_args, call_kwargs)
        # `calls.add` below runs this body once, which records the structure of the result.
        returned[:] = [pytree.tree_map_only(Tensor, lambda _: _TENSOR, result)]
        return tensors_of(result)

    call = PythonCall(function.__name__, _function_text(calls, function, leaves, structure), body)
    results = iter(calls.add(call, tensors_of(leaves), sizes_of(leaves)))
    return pytree.tree_map(lambda leaf: next(results) if leaf is _TENSOR else leaf, returned[0])


def _scoped_function(function: type[Function], scope: TensorScope) -> type[Function]:
    """Return a subclass of the function whose backward runs in a scope."""
    backward = {
        name: staticmethod(_in_scope(getattr(function, name), scope))
        for name in ("backward", "vjp")
        if getattr(function, name) is not getattr(Function, name)
    }
    names = {"__module__": function.__module__, "__qualname__": function.__qualname__}
    kind: Any = type(function)
    scoped: type[Function] = kind(function.__name__, (function,), {**backward, **names})
    return scoped


def _in_scope(function: Callable[..., Any], scope: TensorScope) -> Callable[..., Any]:
    """Return a hook, or the backward of a function, that runs in a scope."""

    @wraps(function)
    def run(*args: Any) -> Any:
        scope.note(args)
        with scope:
            return function(*args)

    return run


def _function_text(calls: PythonCalls, function: type[Function], leaves: list[Any], structure: Any) -> str:
    """Return the text of a call; calls with equal texts do the same."""
    name = f"{function.__module__}.{function.__qualname__}"
    plain = all(isinstance(leaf, (Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves)
    texts = [repr(leaf) if isinstance(leaf, _PLAIN) else "_" for leaf in leaves]
    # Other objects, and functions with closures, may differ in spite of equal texts: number every call.
    number = "" if plain and "<locals>" not in name else f"#{len(calls.calls)}"
    return f"{name}{number}({', '.join(texts)}) {structure}"


# torch passes the accessors of these attributes to a function mode as the called functions.
_attributes: Any = Tensor
_GET_GRAD_FN = _attributes.grad_fn.__get__
_GET_DATA, _SET_DATA = _attributes.data.__get__, _attributes.data.__set__
_SET_REQUIRES_GRAD = _attributes.requires_grad.__set__


class GradientCode(TorchFunctionMode):
    """Mode that adds code of `forward` on gradients to the exported graph.

    Args:
        calls: the calls of Python code in that graph.

    Attributes:
        running: True while `forward` runs; the mode handles no other code.
    """

    def __init__(self, calls: PythonCalls) -> None:
        super().__init__()
        self.calls = calls
        self.running = False
        self._checkpoints = 0  # nesting depth of the running code
        self._lost: list[str] = []  # lines of checkpoints whose results have no gradient
        # Results of `.data` of computed tensors with a gradient, by id; holding the tensors keeps ids unique.
        self._data: dict[int, Tensor] = {}
        self._require = partial(set_requires_grad, calls)
        self._handlers: dict[Any, Callable[..., Any]] = {
            **_REFUSED,
            _apply_by_modes: partial(call_function, calls),
            Tensor.register_hook: partial(hook_tensor, calls),
            Tensor.retain_grad: _retain,
            Tensor.requires_grad_: self._require,
            _SET_REQUIRES_GRAD: self._require,
            _GET_GRAD_FN: self._gradient_node,
            _GET_DATA: self._numbers,
            torch.autograd.grad: partial(take_gradients, calls),
        }

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.running and functionalizes():
            raise CaptureError(
                f"{running_line()} runs inside of torch.func.functionalize, where no graph can follow it. Call the "
                "function itself: a captured graph has no operators that change tensors in place."
            )
        handler = self._handlers.get(func) if self.running else None
        if handler is not None:
            if transforms_active():
                _refuse_transform(func)
            return handler(*args, **(kwargs or {}))
        if self._checkpoints and self.running and torch.is_grad_enabled():
            args, kwargs = self._update_again(func, args, kwargs or {})
        if self.running and kwargs and kwargs.get("requires_grad") is True and not transforms_active():
            # A factory such as torch.zeros: the graph gets the operator without `requires_grad`, and a call to set it.
            return self._require(func(*args, **kwargs | {"requires_grad": False}))
        if args and id(args[0]) in self._data and _changes_first(func):
            raise CaptureError(
                f"{running_line()} changes the numbers of a tensor that has a gradient, unseen by autograd. Compute a "
                "new tensor, such as x.clamp(...) in place of x.data.clamp_(...)."
            )
        result = func(*args, **(kwargs or {}))
        if self.running:
            _check_dense(args, result)
        return result

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the export, in which the mode is active."""
        with collect_calls(self.calls), self, _interception(self):
            yield

    def begin(self) -> None:
        """Begin to handle the code of a call."""
        self.running, self._checkpoints = True, 0

    def end(self, output: Any) -> None:
        """Raise a `CaptureError` if checkpoints are the reason why no output of the call has a gradient."""
        if self._lost and not any(tensor.requires_grad for tensor in tensors_of(output)):
            raise CaptureError(
                f"nothing that forward returns has a gradient: {self._lost[0]} runs a reentrant checkpoint, whose "
                "result has none where no argument of the function needs one. Pass use_reentrant=False to "
                "torch.utils.checkpoint.checkpoint (Hugging Face: gradient_checkpointing_kwargs="
                '{"use_reentrant": False}), or leave it out and say recompute= to autoshard.'
            )

    def checkpoint(self, run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        """Return the result of a reentrant checkpoint, traced as operators to recompute."""
        has_gradient = any(isinstance(argument, Tensor) and argument.requires_grad for argument in args)
        if has_gradient or not torch.is_grad_enabled():
            with self.in_checkpoint(False):
                return run(*args)
        # As in torch: without an argument that requires a gradient, results have none, whatever parameters are used.
        self._lost.append(running_line())
        with torch.no_grad():
            return run(*args)

    @contextlib.contextmanager
    def in_checkpoint(self, has_policy: bool) -> Iterator[None]:
        """Context of a function that backward reruns, with its updates of running statistics.

        If it has a policy of what is saved, the planner decides what is recomputed.
        """
        self._checkpoints += 1
        try:
            with contextlib.nullcontext() if has_policy else Saving("recompute", CHECKPOINT):
                yield
        finally:
            self._checkpoints -= 1

    def _update_again(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments with which batch norm in a checkpoint updates its statistics once per run."""
        runs = 1 + self._checkpoints
        if func is functional.batch_norm and args[1] is not None and kwargs.get("training"):
            # Each run applies the same momentum to the same statistics.
            return args, {**kwargs, "momentum": 1 - (1 - kwargs["momentum"]) ** runs}
        # `==`, not `is`: torch makes a new object for each access of a method.
        if func == Tensor.add_ and isinstance(args[1], int) and any(args[0] is each for each in self._counts()):
            return (args[0], runs * args[1], *args[2:]), kwargs
        return args, kwargs

    def _counts(self) -> Iterator[Tensor | None]:
        return (part.num_batches_tracked for part in self.calls.module.modules() if isinstance(part, _BatchNorm))

    def _gradient_node(self, tensor: Tensor, owner: Any = None) -> Any:
        node = tensor.grad_fn
        return None if node is None else GradientNode(self.calls, tensor, node)

    def _numbers(self, tensor: Tensor, owner: Any = None) -> Tensor:
        # In torch, `.data` is `detach` without a version counter.
        numbers = tensor.detach()
        # Backward may have to read changed values of computed tensors; parameters are copied first.
        if tensor.requires_grad and not self._is_parameters(tensor):
            self._data[id(numbers)] = numbers
        return numbers

    def _is_parameters(self, tensor: Tensor) -> bool:
        """Return True for a parameter, or a view of one."""
        memory = storage_of(tensor)
        return any(storage_of(parameter) == memory for parameter in self.calls.module.parameters())


def _check_dense(args: tuple[Any, ...], result: Any) -> None:
    """Raise a `CaptureError` if a call reads or makes a tensor that is not dense."""
    for value in (*args, result):
        if isinstance(value, Tensor) and not is_dense(value):
            verb = "makes" if value is result else "reads"
            raise CaptureError(f"{running_line()} {verb} a tensor that {dense_fault('', value).strip()}")


def _changes_first(func: Callable[..., Any]) -> bool:
    """Return True if a function of torch changes its first argument in place, by its name."""
    name = getattr(func, "__name__", "")
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in ("__int__", "__index__", "__invert__"))
    return name.endswith("_")


def _refuse_transform(func: Callable[..., Any]) -> None:
    raise CaptureError(
        f"{running_line()} runs {getattr(func, '__name__', func)} inside of a transform of torch.func, where no graph "
        "can follow it. Use torch.autograd.grad(..., create_graph=True) for gradients, and a batch dim in the place of "
        "vmap."
    )


def _refusing(reason: str) -> Callable[..., None]:
    """Return a function that raises a `CaptureError` with the running line and a reason."""

    def refuse(*_: Any) -> None:
        raise CaptureError(f"{running_line()} {reason}")

    return refuse


# Functions that are refused in `forward`.
_REFUSED: dict[Any, Callable[..., None]] = {
    Tensor.register_post_accumulate_grad_hook: _refusing(
        "sets a hook for accumulated gradients in forward, where every call would set another one. Set it on the "
        "parameter, before or after parallelizing."
    ),
    SET_GRAD: _refusing("sets the gradient of a tensor in forward. Do it outside of the module."),
    _SET_DATA: _refusing(
        "gives a tensor other numbers by setting its data: no graph can hold that. Compute a new tensor; change a "
        "buffer, or a frozen parameter, with buffer.copy_(numbers) under torch.no_grad()."
    ),
}


def _retain(tensor: Tensor) -> None:
    tensor.retain_grad()
    if not tensor.is_leaf:
        warn_caller(
            f"{running_line()}: the parallelised module keeps no gradient of tensors inside of it; retain_grad() has "
            "no effect. Set a hook on the tensor to change its gradient, or return the tensor.",
        )


def _apply_by_modes(function: type[torch.autograd.Function], args: Any, kwargs: Any) -> Any:
    """Apply a `torch.autograd.Function` through the active modes."""
    mode = _active_mode()
    if mode is not None:
        if function is CheckpointFunction:
            return mode.checkpoint(*args)
        # Other modes see the call first; `GradientCode` then finds this function among its handlers.
        return handle_torch_function(_apply_by_modes, (), function, args, kwargs)
    if is_tracing() and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_of((args, kwargs))):
        raise CaptureError(
            f"{running_line()} runs a torch.autograd.Function inside of torch.cond or a like operator, whose graph has "
            "no place for its backward. Call the function outside of it, or use torch.where."
        )
    return apply_function(function, args, kwargs)


def _active_mode() -> GradientCode | None:
    """Return the mode that handles the running code; None inside of a call that the graph keeps whole."""
    modes = function_modes()
    if any(isinstance(mode, TensorScope) for mode in modes):
        return None
    return next((mode for mode in modes if isinstance(mode, GradientCode) and mode.running), None)


@contextlib.contextmanager
def _interception(mode: GradientCode) -> Iterator[None]:
    """Context that patches custom functions, hooks of saved tensors and inference mode, which no mode intercepts."""

    def apply(function: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        return _apply_by_modes(function, args, kwargs)

    def enter(hooks: saved_tensors_hooks) -> None:
        _check_saved(hooks)
        torch_enter(hooks)

    torch_enter = saved_tensors_hooks.__enter__
    with contextlib.ExitStack() as stack:
        stack.enter_context(without_checkpoints(mode.in_checkpoint))
        stack.enter_context(applying_functions_by(apply))
        stack.enter_context(attribute_patch(saved_tensors_hooks, "__enter__", enter))
        stack.enter_context(attribute_patch(torch.inference_mode, "__enter__", _enter_inference))
        stack.enter_context(attribute_patch(torch.inference_mode, "__exit__", _leave_inference))
        yield


def _check_saved(hooks: saved_tensors_hooks) -> None:
    """Refuse hooks that may change saved tensors; those of checkpoints and of `save_on_cpu` do not."""
    kind = type(hooks)
    if _active_mode() and not isinstance(hooks, save_on_cpu) and kind.__module__ != "torch.utils.checkpoint":
        raise CaptureError(
            f"{running_line()} sets hooks for the tensors that backward reads ({kind.__name__}), which may change "
            "them: the plan decides what is saved. Leave them out, or write the change as a torch.autograd.Function."
        )


def _enter_inference(context: Any) -> None:
    """Enter `torch.inference_mode` as `torch.no_grad`: a graph cannot hold inference tensors."""
    context.prev = torch.is_grad_enabled()
    torch.set_grad_enabled(not context.mode)


def _leave_inference(context: Any, *error: Any) -> None:
    torch.set_grad_enabled(context.prev)


@contextlib.contextmanager
def no_accumulation() -> Iterator[None]:
    """Context in which code that adds to `.grad` by running `backward` is refused."""
    owner, name = engine_entry()
    engine = getattr(owner, name)

    def run(*args: Any, accumulate_grad: bool = False, **kwargs: Any) -> Any:
        if accumulate_grad:
            raise CaptureError(
                f"{running_line()} runs backward inside of forward, or of the backward of a function, and so adds to "
                "gradients unseen. Use torch.autograd.grad, and return gradients from the function's backward; for "
                "recomputation, torch.utils.checkpoint.checkpoint, or recompute= of autoshard."
            )
        return engine(*args, accumulate_grad=accumulate_grad, **kwargs)

    with attribute_patch(owner, name, run):
        yield
