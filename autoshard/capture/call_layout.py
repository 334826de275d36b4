"""Calls of a module as flat lists of tensors: layouts of arguments and results, and names of tensors."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

import torch
from torch import fx, nn

from autoshard.capture._torch import pytree, storage_of
from autoshard.capture.python.data_reads import RuntimeCheck
from autoshard.capture.python.mutations import Attribute
from autoshard.capture.python.returned_objects import (
    Argument,
    Call,
    Constant,
    leaf_name,
    leaves_by_path,
    restore_objects,
)
from autoshard.errors import InputError
from autoshard.names import matching

InputInfo = TypeVar("InputInfo")


def value_key(value: Any) -> Hashable:
    """Return a hashable key of a value in a call that is not a tensor.

    Raises:
        InputError: it cannot be hashed.
    """
    # As text, so that nan equals nan, and 0.0 differs from -0.0.
    if isinstance(value, float):
        return (type(value), repr(value))
    # With the type: True, 1 and 1.0 are equal in Python, but lead to different graphs.
    if value is None or isinstance(value, (bool, int, str)):
        return (type(value), value)
    try:
        hash(value)
    except TypeError as error:
        raise InputError(
            f"an argument of type {type(value).__name__} is neither a tensor, nor a plain value, nor a container "
            "that torch.utils._pytree knows. Register the type there, or pass its tensors."
        ) from error
    return (type(value), value)


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The flattening of the arguments of a call to its tensors.

    Attributes:
        structure: the structure of `(args, kwargs)`.
        keywords: the names of the keyword arguments, in the order of the structure.
        leaves: in flattening order, the name of each tensor and the value of each other leaf.
    """

    structure: pytree.TreeSpec
    keywords: tuple[str, ...]
    leaves: tuple[str | Constant, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call in the captured order.

        Raises:
            InputError: the call has another structure, or other values that are not tensors.
        """
        if kwargs.keys() != set(self.keywords):
            raise InputError(
                f"captured with keyword arguments {_join_names(self.keywords)}, called with "
                f"{_join_names(tuple(kwargs))}: this graph serves only the first."
            )
        return self.tensors(*pytree.tree_flatten((args, {key: kwargs[key] for key in self.keywords})))

    def tensors(self, leaves: Sequence[Any], structure: pytree.TreeSpec) -> list[torch.Tensor]:
        """Return the tensors of a flattened call, whose keyword arguments are in the order of the structure.

        Raises:
            InputError: the call has another structure, or other values that are not tensors.
        """
        if structure != self.structure:
            raise InputError(f"captured with arguments nested as {self.structure}, called with {structure}.")
        tensors = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(expected, str):
                if not isinstance(leaf, torch.Tensor):
                    raise InputError(f"{expected} was a tensor when captured, and is {leaf!r} in this call.")
                tensors.append(leaf)
            elif isinstance(leaf, torch.Tensor) or value_key(leaf) != value_key(expected.value):
                kind = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise InputError(
                    f"an argument was {expected.value!r} when captured, and is {kind} in this call: capture it again."
                )
        return tensors


def call_layout(module: nn.Module, structure: pytree.TreeSpec, leaves: Sequence[Any]) -> CallLayout:
    """Return the layout of a call from the structure and the leaves of `(args, kwargs)`."""
    keywords = structure.unflatten(range(structure.num_leaves))[1]
    named = zip(leaf_names(module, structure), leaves, strict=True)
    layout = tuple(name if isinstance(leaf, torch.Tensor) else Constant(leaf) for name, leaf in named)
    return CallLayout(structure, tuple(keywords), layout)


def leaf_names(module: nn.Module, structure: pytree.TreeSpec) -> Sequence[str]:
    """Return names such as `input_ids` or `batch['x'][0]` of the leaves of `(args, kwargs)`."""
    # From the class: `forward` of the instance may be wrapped by this or another library.
    return _leaf_names(type(module).forward, structure)


# Calls with local inputs or dynamic sizes need parameters and names every time.
@lru_cache(maxsize=1 << 8)
def _parameters(forward: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(forward).parameters


@lru_cache(maxsize=1 << 8)
def _leaf_names(forward: Callable[..., Any], structure: pytree.TreeSpec) -> Sequence[str]:
    call = structure.unflatten(range(structure.num_leaves))
    parameters = _parameters(forward).values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in parameters if parameter.kind in kinds][1:]  # without `self`
    positional += [f"args[{index}]" for index in range(len(positional), len(call[0]))]
    names = []
    for path, _ in leaves_by_path(call):
        # The first key of a path selects `args` or `kwargs`, the second the argument.
        first, rest = path[1], path[2:]
        head = positional[first.idx] if isinstance(first, pytree.SequenceKey) else str(first.key)
        names.append(head + pytree.keystr(rest))
    return names


def without_omitted_arguments(
    module: nn.Module, inputs: Mapping[str, InputInfo], passed: Container[str]
) -> dict[str, InputInfo]:
    """Return `inputs`, given by name or glob, without arguments of `forward` that a call omits, such as labels."""
    arguments = _parameters(type(module).forward)
    # Keep names that are not arguments, so that an error names them.
    return {
        name: info
        for name, info in inputs.items()
        if name in passed or not matching(re.split(r"[.\[]", name)[0], arguments)
    }


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output that is a view of an input or a buffer.

    Attributes:
        kind: `"input"` or `"buffer"`.
        name: the name of the input or buffer.
        layout: sizes, strides and offset of the view, for a contiguous input or buffer; None for those of the whole.
        is_itself: True for the input or buffer itself.
    """

    kind: str
    name: str
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None
    is_itself: bool = False

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the view of an input or buffer; None if its memory layout differs from the capture's."""
        if self.layout is None:
            return tensor
        # The view's strides are those in a contiguous tensor.
        if not tensor.is_contiguous():
            return None
        size, stride, offset = self.layout
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """The order of a flat list of output tensors: returned tensors, then attributes, then flags of checks.

    Attributes:
        structure: the structure of the object that `forward` returned.
        leaves: in flattening order, the name of each returned tensor, the value of each other leaf, and the arguments
            that are returned unchanged.
        attributes: the tensors that `forward` assigns to Python objects.
        checks: the checks of the run, with one flag each.
        views: outputs that share the memory of an input or a buffer, by name.
    """

    structure: pytree.TreeSpec
    leaves: tuple[str | Constant | Argument, ...]
    attributes: tuple[Attribute, ...] = ()
    checks: tuple[RuntimeCheck, ...] = ()
    views: Mapping[str, OutputView] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the output tensors, such as `loss`, `output[1]`, `hidden_states[0]` or `self.auxiliary_loss`."""
        returned = (leaf for leaf in self.leaves if isinstance(leaf, str))
        assigned = (attribute.name for attribute in self.attributes)
        return (*returned, *assigned, *(f"check {place}" for place in range(len(self.checks))))

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Raise the error of the first failed check, or warn."""
        if not self.checks:
            return
        # Stacked, so that one synchronisation copies all flags from the device.
        flags = torch.stack([tensor.detach() for tensor in tensors[-len(self.checks) :]]).tolist()
        for check, flag in zip(self.checks, flags, strict=True):
            if flag is not check.wanted:
                check.fail()

    def unflatten(self, tensors: list[Any], call: Call = ((), {})) -> Any:
        """Return the user's output object, filled with these tensors and with the arguments of the call."""
        assert len(tensors) == len(self.names), f"{len(self.names)} output tensors were captured, got {len(tensors)}"
        remaining = iter(tensors)
        leaves = [
            next(remaining) if isinstance(leaf, str) else leaf.value if isinstance(leaf, Constant) else leaf
            for leaf in self.leaves
        ]
        return restore_objects(self.structure.unflatten(leaves), call)

    def assigned_tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors that `forward` assigns to Python objects."""
        end = len(tensors) - len(self.checks)
        values = tensors[end - len(self.attributes) : end]
        return [
            value if attribute.differentiable else value.detach()
            for attribute, value in zip(self.attributes, values, strict=True)
        ]


def result_names(structure: pytree.TreeSpec) -> list[str]:
    """Return a readable name for every leaf of an output of this structure."""
    example = structure.unflatten(range(structure.num_leaves))
    return [leaf_name(path) for path, _ in leaves_by_path(example)]


def find_output_views(
    outputs: Mapping[str, fx.Node], sources: Iterable[tuple[str, str, fx.Node]]
) -> Iterator[tuple[str, OutputView]]:
    """Yield the names of outputs that are views of a buffer or an input, with the views.

    Args:
        outputs: nodes of an exported graph with in-place changes.
        sources: kinds, names and placeholders of the inputs of the graph.
    """
    held = {
        storage_of(node.meta["val"]): (kind, name, node) for kind, name, node in sources if kind in ("input", "buffer")
    }
    for output, node in outputs.items():
        value = node.meta["val"]
        kind, name, origin = held.get(storage_of(value), ("", "", node))
        source = origin.meta["val"]
        # A view of another dtype, such as `view_as_real`, has no strides in terms of its base.
        if not kind or value.dtype != source.dtype:
            continue
        layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
        source_layout = (tuple(source.shape), tuple(source.stride()), source.storage_offset())
        # As text: comparing symbolic sizes would record a condition on them.
        if str(layout) == str(source_layout):
            yield output, OutputView(kind, name, None, node is origin)
        elif all(isinstance(number, int) for number in (*layout[0], *layout[1], layout[2])):
            yield output, OutputView(kind, name, layout)
