"""Python code that an exported graph calls unchanged: functions with their own backward, and hooks of gradients.

`torch.export` traces only the forward half of such code, so the code is kept whole: while a module is exported, one
operator represents it in the graph. Afterwards a node calls the code whenever the graph is run. A trace of the joint
graph runs the code under autograd, and so finds operators for its backward that have rules.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from autoshard.capture._torch import FakeTensor, outside_modes, pytree, storage_of, version_of
from autoshard.capture.capture_errors import running_line
from autoshard.capture.python.data_reads import READS
from autoshard.capture.python.mutations import Mutations
from autoshard.capture.replacements import Exportable, current_replacements
from autoshard.errors import CaptureError
from autoshard.operator_library import define_for_autograd

_attributes: Any = Tensor  # attributes of the class are descriptors, which type checkers do not know
SET_GRAD = _attributes.grad.__set__


class TensorScope(Exportable):
    """Mode for code that a graph calls; parts of it that run later, such as backward, re-enter it.

    Losses, bags, recurrent layers and attention are computed in it as in exported code.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # `==`, not `is`: every access of the descriptor makes a new object.
        if func == SET_GRAD:
            raise CaptureError(
                f"{running_line()} sets the gradient of a tensor in the midst of backward: no graph can hold that. "
                "Take the tensor as an argument of the function, and return its gradient from backward."
            )
        if func in READS and isinstance(args[0], FakeTensor):
            raise CaptureError(
                f"{running_line()} asks for the numbers in a tensor in a hook or in a function with its own backward: "
                "the graph of a step has no place for Python that depends on numbers. Keep them in tensors; gradients "
                "are found in .grad behind backward(), or in forward, by torch.autograd.grad."
            )
        args, kwargs = pytree.tree_map_only(Tensor, self.resolve, (args, kwargs or {}))
        result = super().__torch_function__(current_replacements().called_code.get(func, func), types, args, kwargs)
        self.note(result)
        return result

    def resolve(self, tensor: Tensor) -> Tensor:
        """Return the tensor to read in place of `tensor`."""
        return tensor

    def note(self, result: Any) -> None:
        """Record the result of a call."""


class FreeTensors(TensorScope):
    """Scope that finds the free tensors of code: those that it reads but neither takes as arguments nor makes.

    Args:
        given: the arguments of the code.

    Attributes:
        tensors: the tensors, in the order in which they are read first.
    """

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []
        self._versions: list[int] = []
        # Keep the code's tensors alive, so that ids and storages are not reused.
        self._own: dict[int, Tensor] = {}
        self._memory: set[int] = set()
        for tensor in given:
            self._keep(tensor)

    def has_mutated_tensor(self) -> bool:
        """Return True if the code changed one of the tensors in place."""
        return any(version_of(tensor) != version for tensor, version in zip(self.tensors, self._versions, strict=True))

    def resolve(self, tensor: Tensor) -> Tensor:
        # Autograd returns saved tensors as new objects over known memory.
        if id(tensor) not in self._own and storage_of(tensor) not in self._memory:
            self.tensors.append(tensor)
            self._versions.append(version_of(tensor))
            self._keep(tensor)
        return tensor

    def note(self, result: Any) -> None:
        pytree.tree_map_only(Tensor, self._keep, result)

    def _keep(self, tensor: Tensor) -> None:
        self._own[id(tensor)] = tensor
        self._memory.add(storage_of(tensor))


class Substitution(TensorScope):
    """Scope that replaces the tensors with which code was exported.

    Args:
        tensors: `id` of a tensor that the code names -> its replacement.
    """

    def __init__(self, tensors: Mapping[int, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors

    def resolve(self, tensor: Tensor) -> Tensor:
        return self.tensors.get(id(tensor), tensor)


Body = Callable[[list[Tensor], list[int], TensorScope], list[Tensor]]
"""Code to call: takes tensors, sizes, and the scope in which its parts run; returns tensors."""

operators = torch.ops.autoshard


@dataclass(eq=False, repr=False)
class PythonCall:
    """Code that a node calls with the tensors of a run, in place of those of the export.

    Attributes:
        name: of the call in a printed graph.
        text: equal for calls that do the same, on all ranks.
        body: the code.
        has_effect: True if the code is called for its effect, and returns nothing.
        history: number of leading operands whose autograd history the code needs.
        alone: code with the same results that needs no history; None for `body`.
        shares_state: True if the code shares state with other calls that the graph does not show.
        where: the user's line that made the call.
        changes_operands: True if the code changes operands in place, and returns them.
        free: the tensors that the code reads besides its arguments, each with all its names.
    """

    name: str
    text: str
    body: Body
    has_effect: bool = False
    history: int = 0
    alone: Body | None = None
    shares_state: bool = False
    where: str = field(default_factory=running_line, init=False)
    changes_operands: bool = field(default=False, init=False)
    free: list[tuple[Tensor, ...]] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        # A graph prints the function that a node calls by these names.
        self.__name__ = self.__qualname__ = self.name

    def __call__(self, tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
        """Run the code; the last of `tensors` replace those of `free`."""
        return self._run(self.body, tensors, sizes)

    def run_alone(self, tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
        """Return results like those of a call, for tensors without history."""
        return self._run(self.alone or self.body, tensors, sizes)

    def _run(self, body: Body, tensors: Sequence[Tensor], sizes: Sequence[int]) -> list[Tensor]:
        arguments = list(tensors[: len(tensors) - len(self.free)])
        known = zip(self.free, tensors[len(arguments) :], strict=True)
        scope = Substitution({id(name): tensor for names, tensor in known for name in names})
        return body(arguments, list(sizes), scope)

    def __str__(self) -> str:
        return self.text

    # A copied graph calls the same code; `free` has its tensors by identity.
    def __deepcopy__(self, memo: dict[int, Any]) -> PythonCall:
        return self


@dataclass(slots=True)
class PythonCalls:
    """The calls of one export.

    Attributes:
        module: the exported module.
        mutations: record of the changes of Python objects.
        module_tensors: parameters and buffers outside of the export, by name.
        calls: the calls, by the number in the operator.
    """

    module: nn.Module
    mutations: Mutations
    module_tensors: dict[str, Tensor] = field(init=False)
    calls: list[PythonCall] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.module_tensors = dict(module_tensors(self.module))

    def is_module_tensor(self, tensor: Tensor) -> bool:
        """Return True if the tensor is a parameter or buffer of the module."""
        return any(tensor is each for _, each in module_tensors(self.module))

    def add(self, call: PythonCall, tensors: Sequence[Tensor], sizes: Sequence[int] = ()) -> list[Tensor]:
        """Add a call to the graph that is being exported, and return its results.

        Raises:
            CaptureError: the code changes a tensor in place, and neither returns it nor calls `ctx.mark_dirty`.
        """
        given = list(tensors)
        free = _try_call(call, given, list(sizes), self.mutations)
        # During export a module has different parameters than later, when the graph is run: the code may name either.
        named = {id(tensor): name for name, tensor in module_tensors(self.module)}
        for tensor in free:
            name = named.get(id(tensor))
            call.free.append((tensor,) if name is None else (tensor, self.module_tensors[name]))
        self.calls.append(call)
        number = len(self.calls) - 1
        if call.has_effect:
            operators.python_effect([*given, *free], list(sizes), number)
            return []
        return list(operators.python_call([*given, *free], list(sizes), number))


def module_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, under all their names."""
    return itertools.chain(
        module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)
    )


def _try_call(call: PythonCall, tensors: list[Tensor], sizes: list[int], mutations: Mutations) -> list[Tensor]:
    """Run the code and its backward hidden from the export, and return the free tensors that it reads."""
    scope = FreeTensors([] if call.has_effect else tensors)  # a hook takes only a gradient
    versions = [version_of(tensor) for tensor in tensors]
    # Without the modes of the export, which would add each operator of the code to the graph.
    mode = next((tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)), contextlib.nullcontext())
    with outside_modes(), mode:
        results = call.body(tensors, sizes, scope)
        with mutations.refusing(call.where):
            _differentiate(results, tensors)
    kept = {id(result) for result in results}
    changed = [tensor for tensor, version in zip(tensors, versions, strict=True) if version_of(tensor) != version]
    if any(id(tensor) not in kept for tensor in changed) or scope.has_mutated_tensor():
        raise CaptureError(
            f"{call.__name__} changes a tensor in place at {call.where}, and does not say so: no graph can hold "
            "that. Return the tensor, with ctx.mark_dirty(tensor) in the function's forward, or return a new one, and "
            "update buffers in the forward of the module."
        )
    call.changes_operands = bool(changed)
    return scope.tensors


def _differentiate(results: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Run the backward to find the tensors that it reads; its errors are those of tracing."""
    # Only running it finds the tensors that only backward names.
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    differentiable = [result for result in results if result.requires_grad]
    if wanted and differentiable:
        with contextlib.suppress(Exception):
            gradients = [torch.ones_like(result) for result in differentiable]
            torch.autograd.grad(differentiable, wanted, gradients, allow_unused=True, retain_graph=True)


_active: ContextVar[PythonCalls | None] = ContextVar("autoshard_python_calls", default=None)


@contextlib.contextmanager
def collect_calls(calls: PythonCalls) -> Iterator[None]:
    """Context of the export of these calls."""
    token = _active.set(calls)
    try:
        yield
    finally:
        _active.reset(token)


def _run(tensors: list[Tensor], sizes: list[int], number: int) -> list[Tensor]:
    calls = _active.get()
    assert calls is not None, "the operators of Python calls run during an export alone"
    return calls.calls[number](tensors, sizes)


def _run_for_effect(tensors: list[Tensor], sizes: list[int], number: int) -> None:
    _run(tensors, sizes, number)


# Declared to change its tensors, since a call without results would be dropped as dead code.
define_for_autograd("python_call(Tensor[] tensors, SymInt[] sizes, int number) -> Tensor[]", _run)
define_for_autograd("python_effect(Tensor(a!)[] tensors, SymInt[] sizes, int number) -> ()", _run_for_effect)


def replace_python_calls(graph: fx.Graph, calls: PythonCalls) -> None:
    """Replace the operators that represent calls by the calls."""
    for target in (operators.python_call.default, operators.python_effect.default):
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = calls.calls[node.args[-1]]
            node.args = node.args[:-1]


def is_effect(node: fx.Node) -> bool:
    """Return True if a node is a call for its effect on the gradients of its operands."""
    return isinstance(node.target, PythonCall) and node.target.has_effect


def sizes_of(leaves: Sequence[Any]) -> list[Any]:
    """Return the symbolic sizes among arguments."""
    return [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
