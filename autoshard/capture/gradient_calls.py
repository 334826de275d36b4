"""Code of `forward` that acts on gradients, as calls of Python code in the exported graph.

Such code is functions with their own backward, hooks on tensors, and gradients that `forward` takes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import BackwardCFunction

from autoshard.capture._torch import apply_function, pytree, version_of
from autoshard.capture.capture_errors import running_line
from autoshard.capture.mutations import Mutations
from autoshard.capture.python_calls import FreeTensors, PythonCall, PythonCalls, TensorScope, sizes_of, tensors_of
from autoshard.errors import CaptureError

Hook = Callable[..., Any]


class HookHandle:
    """Handle of a hook: `remove` takes the hook back, as that of torch's handle does."""

    def __init__(self) -> None:
        self.removed = False

    def remove(self) -> None:
        """Leave the hook out."""
        self.removed = True


def hook_tensor(calls: PythonCalls, tensor: Tensor, hook: Hook) -> HookHandle:
    """Put `tensor.register_hook(hook)` into the graph of a module that is exported."""
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
    """A `grad_fn` as code sees it while it is exported: hooks on that of a custom function become calls."""

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
        # The traced graph may use other operators than torch's own backward would, so its nodes have no counterpart.
        if not isinstance(self._node, BackwardCFunction):
            raise CaptureError(
                f"{running_line()} sets a hook on {self._node.name()}, a step of torch's own backward, which the graph "
                "need not have. Set it on the tensor: tensor.register_hook(hook)."
            )
        return _set_hook(self._calls, method, self._tensor, hook, _grad_fn)


def _set_hook(
    calls: PythonCalls, method: str, tensor: Tensor, hook: Hook, owner: Callable[[Tensor], Any]
) -> HookHandle:
    """Put a call that sets a hook into the graph; `owner` returns what the hook is set on: the tensor, or its node."""
    handle = HookHandle()

    def body(tensors: list[Tensor], sizes: list[int], scope: TensorScope) -> list[Tensor]:
        def run(*gradients: Any) -> Any:
            scope.note(gradients)
            with scope:
                return hook(*gradients)

        # In a scope of FreeTensors, the call is only tried, to find the tensors that the hook reads.
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
    """Run a hook to find what it reads, and warn if it changes no gradient."""
    gradient = torch.empty_like(tensor, requires_grad=False)
    version = version_of(gradient)
    with mutations.refusing(where):
        result = run(gradient)
    if result is None and version_of(gradient) == version:
        warnings.warn(
            f"the hook of {where} returns None: it runs while the step is captured, without numbers, and not in the "
            "steps themselves.",
            stacklevel=2,
        )


def _hook_text(calls: PythonCalls, method: str, hook: Hook) -> str:
    """Return the text of a hook in fingerprints."""
    # Plain functions without surroundings are told apart by their source line. All others may read anything: each has
    # a number of its own.
    if isinstance(hook, FunctionType) and not (hook.__closure__ or hook.__defaults__ or hook.__kwdefaults__):
        return f"{method} {hook.__module__}.{hook.__qualname__}:{hook.__code__.co_firstlineno}"
    return f"{method} #{len(calls.calls)}"


def set_requires_grad(calls: PythonCalls, tensor: Tensor, requires_grad: bool = True) -> Tensor:
    """Put `tensor.requires_grad_(requires_grad)` into the graph of a module that is exported.

    Raises:
        CaptureError: the tensor is a parameter or buffer: these keep what they had before the call.
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
    """Put a call of `torch.autograd.grad` into the graph of a module that is exported."""
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


# The place of a tensor in the result of a function.
_TENSOR = object()

# Arguments whose text tells them apart.
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.memory_format)


def call_function(
    calls: PythonCalls, function: type[Function], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Apply a function while its caller is exported, and return its result."""
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
        # `calls.add` below runs this body once: the structure of the result is known then.
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


def _in_scope(backward: Callable[..., Any], scope: TensorScope) -> Callable[..., Any]:
    @wraps(backward)
    def run(*args: Any) -> Any:
        scope.note(args)
        with scope:
            return backward(*args)

    return run


def _function_text(calls: PythonCalls, function: type[Function], leaves: list[Any], structure: Any) -> str:
    """Return the text of a call: two calls with equal texts do the same."""
    name = f"{function.__module__}.{function.__qualname__}"
    plain = all(isinstance(leaf, (Tensor, torch.SymInt, *_PLAIN)) for leaf in leaves)
    texts = [repr(leaf) if isinstance(leaf, _PLAIN) else "_" for leaf in leaves]
    # Other objects, and functions with closures, may differ though their texts are equal: every call has a number.
    number = "" if plain and "<locals>" not in name else f"#{len(calls.calls)}"
    return f"{name}{number}({', '.join(texts)}) {structure}"
