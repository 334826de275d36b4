"""Dynamic sizes: a caller's declarations, the export with them, and the calls that a graph serves."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import nn
from torch.export import Dim, ShapesCollection
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes

from autoshard.capture._torch import UserError, attribute_patch
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.call_layout import without_omitted_arguments
from autoshard.errors import InputError
from autoshard.size import Sizes, evaluate

Dynamic = Mapping[str, Mapping[int, Any]]
"""For inputs by name, the dims whose sizes may differ between calls: each with a name, or a `torch.export.Dim`."""

# Sizes 0 and 1 behave differently, since they broadcast: calls with them have separate graphs.
_SMALLEST = 2


@dataclass(frozen=True, slots=True)
class DynamicSizes:
    """The dynamic sizes of a captured graph.

    Attributes:
        dims: for every input, the sizes of dynamic dims: a symbol, or an expression linear in one.
        ranges: the minimum and the maximum of every symbol that the graph serves; None for no limit.
        conditions: conditions on the symbols, all of which calls must satisfy.
        example: the values of the symbols in the capture.
        unit: the symbol, if any, of which dims are fixed multiples: it represents the parts in which ranks hold dims
            (`patterns.parts`).
        cuts: for the placeholders of a graph with a unit, the places where dims are cut so that the parts become a
            separate factor, each as the sizes outside the cut.
    """

    dims: Mapping[str, Mapping[int, sympy.Expr]]
    ranges: Mapping[sympy.Symbol, tuple[int, int | None]]
    conditions: tuple[sympy.Expr, ...]
    example: Sizes
    unit: sympy.Symbol | None = None
    cuts: Mapping[str, Mapping[int, tuple[sympy.Expr, ...]]] = field(default_factory=dict)

    def serves(self, sizes: Sizes) -> bool:
        """Return True if the graph serves a call with these sizes."""
        for name, (low, high) in self.ranges.items():
            if sizes[name] < low or (high is not None and sizes[name] > high):
                return False
        return all(evaluate(condition, sizes) == sympy.true for condition in self.conditions)

    def sizes_of(self, shapes: Mapping[str, tuple[int, ...]]) -> Sizes:
        """Return the values of the symbols in a call whose inputs have these global shapes.

        Raises:
            InputError: one symbol has two values, or no whole number gives a size by its declared expression.
        """
        values: dict[sympy.Symbol, tuple[int, str]] = {}
        for name, dims in self.dims.items():
            for dim, expr in dims.items():
                symbol, constant, factor = linear_form(expr)
                size = shapes[name][dim]
                text = f"dim {dim} of {name} is {size}"
                value, rest = divmod(size - constant, factor)
                # A dim that is a multiple, such as 8 * batch, takes only such sizes.
                if rest:
                    raise InputError(f"{text}, and was declared to be {expr}: pad the input to such a size.")
                if values.setdefault(symbol, (value, text))[0] != value:
                    raise _unequal_error(text, values[symbol][1], str(symbol))
        return {symbol: values[symbol][0] for symbol in self.example}


def linear_form(expr: sympy.Expr) -> tuple[sympy.Symbol, int, int]:
    """Return symbol, constant and factor of a dim's size, which is constant + factor * symbol."""
    (symbol,) = expr.free_symbols
    return symbol, int(expr.subs(symbol, 0)), int(expr.coeff(symbol, 1))


def _unequal_error(text: str, text_before: str, name: str) -> InputError:
    return InputError(
        f'{text}, but {text_before}, and both were declared as "{name}": pass inputs of equal sizes, or give the dims '
        "names of their own."
    )


def may_be_dynamic(dynamic: Dynamic, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if one graph can serve the call with these inputs and calls of other sizes.

    Raises:
        InputError: `dynamic` names an input or a dim that does not exist, or gives one name to two sizes.
    """
    smallest = _SMALLEST
    named: dict[str, tuple[int, str]] = {}
    for name, dims in dynamic.items():
        if name not in shapes:
            raise InputError(f"dynamic: there is no input {name!r}; the inputs are {', '.join(shapes) or 'none'}.")
        for dim, declaration in dims.items():
            ndim = len(shapes[name])
            if not isinstance(dim, int) or not -ndim <= dim < ndim:
                raise InputError(
                    f"dynamic: {name} has shape {list(shapes[name])}, and so no dim {dim!r}: dims are 0 to {ndim - 1}."
                )
            size, text = shapes[name][dim], f"dim {dim} of {name} is {shapes[name][dim]}"
            smallest = min(smallest, size)
            # Sizes with a `Dim` may be multiples of it: torch compares them.
            symbol = declaration if isinstance(declaration, str) else ""
            if symbol and named.setdefault(symbol, (size, text))[0] != size:
                raise _unequal_error(text, named[symbol][1], symbol)
    return smallest >= _SMALLEST


def dynamic_signature(call: BoundCall, dynamic: Dynamic) -> Hashable | None:
    """Return the signature of a call without its dynamic sizes; None if it has none.

    Raises:
        InputError: as for `may_be_dynamic` and for the signature.
    """
    passed = without_omitted_arguments(call.module, dynamic, call.shapes)
    return call.signature_of_dynamic(passed) if passed and may_be_dynamic(passed, call.shapes) else None


def export_dynamic(call: BoundCall, dynamic: Dynamic) -> tuple[torch.export.ExportedProgram, dict[str, dict[int, str]]]:
    """Export with dynamic sizes.

    Returns:
        The program, and for every input the names of its dynamic dims.

    Raises:
        InputError: an input, a dim or a name is not valid, or the example is too small to represent other sizes.
        UserError: (by torch) the model supports no size except the example's.
    """
    module, kwargs, inputs = call.module, dict(call.kwargs), call.tensors
    dims = _declared_dims(inputs, dynamic)

    def export() -> torch.export.ExportedProgram:
        shapes = ShapesCollection()
        for name, dims_of_input in dims.items():
            shapes[inputs[name]] = dict(dims_of_input)
        dynamic_shapes = shapes.dynamic_shapes(module, call.args, kwargs)
        return torch.export.export(module, call.args, kwargs, dynamic_shapes=dynamic_shapes, strict=False)

    with _named_keywords(module, kwargs):
        try:
            program = export()
        except UserError as error:
            # The model limits a size, such as by its longest sequence: export again within that range.
            refined = _refine_dims(dims, str(error))
            if refined is None:
                raise
            dims = refined
            program = export()
    # A multiple such as `8 * batch` has the name of its root.
    roots = {name: {dim: getattr(each, "root", each).__name__ for dim, each in of.items()} for name, of in dims.items()}
    return program, roots


def _declared_dims(inputs: Mapping[str, torch.Tensor], dynamic: Dynamic) -> dict[str, dict[int, Any]]:
    """Return, for every input, its dynamic dims as torch's `Dim`s."""
    if not may_be_dynamic(dynamic, {name: tuple(tensor.shape) for name, tensor in inputs.items()}):
        raise InputError(
            f"dynamic: a size that is to change is 0 or 1 in the example, which behave unlike others and can't stand "
            f"for them. Use an example of at least {_SMALLEST} there."
        )
    known: dict[str, Any] = {}
    return {
        name: {
            dim % inputs[name].ndim: _torch_dim(declaration, known, f"dynamic: dim {dim} of {name}")
            for dim, declaration in dims.items()
        }
        for name, dims in dynamic.items()
    }


def _torch_dim(declaration: object, known: dict[str, Any], where: str) -> Any:
    """Return the `Dim` that a caller named or made; the same one for the same name."""
    if isinstance(declaration, Dim):
        return declaration
    if not isinstance(declaration, str) or not declaration.isidentifier():
        raise InputError(f'{where}: {declaration!r} is neither a name, such as "batch", nor a torch.export.Dim.')
    return known.setdefault(declaration, Dim(declaration))


@contextlib.contextmanager
def _named_keywords(module: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Context in which the signature of `forward` names each argument passed through its `**kwargs`."""
    # With dynamic sizes `torch.export` counts such arguments twice: by name, and as the mapping.
    forward = module.forward
    signature = inspect.signature(forward)
    named = {name: each for name, each in signature.parameters.items() if each.kind is not each.VAR_KEYWORD}
    if len(named) == len(signature.parameters):
        yield
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in kwargs if name not in named]
    vars(call)["__signature__"] = signature.replace(parameters=[*named.values(), *added])
    with attribute_patch(module, "forward", call):
        yield


def _refine_dims(dims: Mapping[str, Mapping[int, Any]], reason: str) -> dict[str, dict[int, Any]] | None:
    """Return the dims as torch's error text suggests them; None without a suggestion, or for a fixed size."""
    _, heading, suggestions = reason.partition("Suggested fixes:")
    if not heading:
        return None
    fixes = heading + suggestions.split("\n\n")[0]  # advice follows, which torch's parser does not accept
    refined: Any = refine_dynamic_shapes_from_suggested_fixes(fixes, {name: dict(of) for name, of in dims.items()})
    fixed = any(isinstance(size, int) for of in refined.values() for size in of.values())
    return None if fixed else refined
