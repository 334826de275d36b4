"""Sizes that calls may change: what a caller says of them, what `torch.export` is told, which calls a graph serves."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, ShapesCollection
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from autoshard.capture._torch import UserError, attribute_patch, pytree
from autoshard.capture.call_layout import call_layout
from autoshard.errors import InputError
from autoshard.size import Sizes, evaluate

Dynamic = Mapping[str, Mapping[int, Any]]
"""For inputs by name, the dims that calls may change: each with a name, or a `torch.export.Dim`."""

_SMALLEST = 2
"""Tensors of no or one element along a dim behave otherwise: they broadcast, and such a call has a graph of its own."""


@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """The dynamic sizes of a captured graph.

    Attributes:
        dims: for every input, the dims that may change, and what they are: a symbol, or linear in one.
        ranges: the smallest and the largest value of every symbol that the graph serves; None for no limit.
        conditions: what else must hold of the symbols for the graph to be that of a call.
        example: the values of the symbols when it was captured.
        unit: the symbol, if there is one, of which sizes are multiples that do not change from call to call: it stands
            for the parts in which ranks hold dims (`patterns.parts`).
        cuts: for the placeholders of such a graph, where their dims are cut so that the parts are a loop of their own:
            by the sizes of what lies outside of each cut.
    """

    dims: Mapping[str, Mapping[int, sympy.Expr]]
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    conditions: tuple[sympy.Expr, ...]
    example: Sizes
    unit: sympy.Symbol | None = None
    cuts: Mapping[str, Mapping[int, tuple[sympy.Expr, ...]]] = field(default_factory=dict)

    def serves(self, sizes: Sizes) -> bool:
        """Whether the graph is that of a call with these sizes."""
        for name, (low, high) in self.ranges.items():
            if sizes[name] < low or (high is not None and sizes[name] > high):
                return False
        return all(evaluate(condition, sizes) == sympy.true for condition in self.conditions)

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
        """The values of the symbols in a call whose inputs have these global shapes.

        Raises:
            InputError: one symbol has two values, or a size is not what its dim was said to be a multiple of.
        """
        found: dict[sympy.Symbol, tuple[int, str]] = {}
        for name, dims in self.dims.items():
            for dim, expr in dims.items():
                (own,) = expr.free_symbols
                size, said = shapes[name][dim], f"dim {dim} of {name} is {shapes[name][dim]}"
                value, left = divmod(size - int(expr.subs(own, 0)), int(expr.coeff(own, 1)))
                if left:
                    raise InputError(f"{said}, and was declared to be {expr}: pad the input to such a size.")
                if found.setdefault(own, (value, said))[0] != value:
                    raise _unequal_error(said, found[own][1], str(own))
        return {name: found[name][0] for name in self.example}


def _unequal_error(said: str, before: str, name: str) -> InputError:
    return InputError(
        f'{said}, but {before}, and both were declared as "{name}": pass inputs of equal sizes, or give the dims names '
        "of their own."
    )


def may_be_dynamic(dynamic: Dynamic, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the call of these inputs can stand for calls of other sizes, and they for it.

    Raises:
        InputError: `dynamic` names what is no input, or a dim that it has not, or gives one name to two sizes.
    """
    smallest = _SMALLEST
    named: dict[str, tuple[int, str]] = {}
    for name, dims in dynamic.items():
        if name not in shapes:
            raise InputError(f"dynamic: there is no input {name!r}; the inputs are {', '.join(shapes) or 'none'}.")
        for dim, said in dims.items():
            ndim = len(shapes[name])
            if not isinstance(dim, int) or not -ndim <= dim < ndim:
                raise InputError(
                    f"dynamic: {name} has shape {list(shapes[name])}, and so no dim {dim!r}: dims are 0 to {ndim - 1}."
                )
            size, text = shapes[name][dim], f"dim {dim} of {name} is {shapes[name][dim]}"
            smallest = min(smallest, size)
            own = said if isinstance(said, str) else ""
            if own and named.setdefault(own, (size, text))[0] != size:
                raise _unequal_error(text, named[own][1], own)
    return smallest >= _SMALLEST


def export_dynamic(
    twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dynamic: Dynamic
) -> tuple[torch.export.ExportedProgram, dict[str, dict[int, str]]]:
    """Export with dynamic sizes; where the model sets a range for a size, such as its longest sequence, in that range.

    Returns:
        The program, and for every input the names of its dynamic dims.

    Raises:
        InputError: there is no such input or dim, a name is none, or the example is too small to stand for others.
        CaptureError: the model allows no other size than the example's.
    """
    inputs = _inputs(twin, args, kwargs)
    dims = _declared_dims(inputs, dynamic)
    try:
        program = _export(twin, args, kwargs, inputs, dims)
    except UserError as error:
        refined = _refine_dims(dims, str(error))
        if refined is None:
            raise
        dims = refined
        program = _export(twin, args, kwargs, inputs, dims)
    names = {
        name: {dim: getattr(made, "root", made).__name__ for dim, made in own.items()} for name, own in dims.items()
    }
    return program, names


def _inputs(twin: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a call by name."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    names = call_layout(twin, structure, leaves).leaves
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}


def _declared_dims(inputs: Mapping[str, torch.Tensor], dynamic: Dynamic) -> dict[str, dict[int, Any]]:
    """For every input, its dynamic dims as torch's `Dim`s."""
    if not may_be_dynamic(dynamic, {name: tuple(tensor.shape) for name, tensor in inputs.items()}):
        raise InputError(
            f"dynamic: a size that is to change is 0 or 1 in the example, which behave unlike others and can't stand "
            f"for them. Use an example of at least {_SMALLEST} there."
        )
    known: dict[str, Any] = {}
    return {
        name: {
            dim % inputs[name].ndim: _torch_dim(said, known, f"dynamic: dim {dim} of {name}")
            for dim, said in dims.items()
        }
        for name, dims in dynamic.items()
    }


def _torch_dim(said: object, known: dict[str, Any], where: str) -> Any:
    """The `Dim` that a caller named or made; one for each name."""
    if isinstance(said, Dim):
        return said
    if not isinstance(said, str) or not said.isidentifier():
        raise InputError(f'{where}: {said!r} is neither a name, such as "batch", nor a torch.export.Dim.')
    return known.setdefault(said, Dim(said))


def _export(
    twin: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    inputs: Mapping[str, torch.Tensor],
    dims: Mapping[str, Mapping[int, Any]],
) -> torch.export.ExportedProgram:
    shapes = ShapesCollection()
    for name, own in dims.items():
        shapes[inputs[name]] = dict(own)
    with _named_keywords(twin, kwargs):
        told = shapes.dynamic_shapes(twin, args, dict(kwargs))
        return torch.export.export(twin, args, dict(kwargs), dynamic_shapes=told, strict=False)


@contextlib.contextmanager
def _named_keywords(twin: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the signature of `forward` names each argument that its `**kwargs` takes.

    `torch.export` counts such arguments twice where sizes are dynamic: by their names, and as the mapping.
    """
    forward = twin.forward
    signature = inspect.signature(forward)
    named = {name: one for name, one in signature.parameters.items() if one.kind is not inspect.Parameter.VAR_KEYWORD}
    if len(named) == len(signature.parameters):
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in named]
    vars(call)["__signature__"] = signature.replace(parameters=[*named.values(), *added])
    with attribute_patch(twin, "forward", call):
        yield


def _refine_dims(dims: Mapping[str, Mapping[int, Any]], reason: str) -> dict[str, dict[int, Any]] | None:
    """The dims as torch suggests them; None where it has nothing to suggest, or only a fixed size."""
    _, found, suggested = reason.partition("Suggested fixes:")
    if not found:
        return None
    fixes = found + suggested.split("\n\n")[0]  # what follows is advice
    refined: Any = refine_dynamic_shapes_from_suggested_fixes(fixes, {name: dict(own) for name, own in dims.items()})
    fixed = any(isinstance(made, int) for own in refined.values() for made in own.values())
    return None if fixed else refined
