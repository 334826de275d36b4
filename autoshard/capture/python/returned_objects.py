"""Objects in the result of a call that no graph can hold: dataclasses, opaque objects, and returned arguments."""

from __future__ import annotations

import dataclasses
import enum
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from autoshard.capture._torch import pytree
from autoshard.errors import warn_caller

Path = tuple[Any, ...]
Call = tuple[Sequence[Any], Mapping[str, Any]]
"""The positional and the keyword arguments of a call."""


def leaves_by_path(tree: Any) -> list[tuple[Path, Any]]:
    """Return the leaves of a tree with their paths of pytree keys, as `tree_flatten_with_path` does."""
    leaves: list[tuple[Path, Any]] = []
    for path, leaf in pytree.tree_flatten_with_path(tree, is_leaf=_is_keyless)[0]:
        if not _is_keyless(leaf):
            leaves.append((path, leaf))
            continue
        # torch raises an error for types registered without keys, such as the outputs of diffusers: use the keys of a
        # mapping, or positions.
        parts, _ = pytree.SUPPORTED_NODES[type(leaf)].flatten_fn(leaf)
        is_mapping = isinstance(leaf, Mapping) and len(leaf) == len(parts)
        keys = [pytree.MappingKey(key) for key in leaf] if is_mapping else map(pytree.SequenceKey, range(len(parts)))
        for key, part in zip(keys, parts, strict=True):
            leaves += [((*path, key, *rest), value) for rest, value in leaves_by_path(part)]
    return leaves


def leaf_name(path: Path) -> str:
    """Return a readable name of a leaf of an output, such as `loss`, `hidden_states[0]` or `output[1]`."""
    first = path[0] if path else None
    if isinstance(first, pytree.MappingKey):
        return str(first.key) + pytree.keystr(path[1:])
    if isinstance(first, pytree.GetAttrKey):
        return first.name + pytree.keystr(path[1:])
    return "output" + pytree.keystr(path)


def _is_keyless(node: Any) -> bool:
    definition = pytree.SUPPORTED_NODES.get(type(node))
    return definition is not None and definition.flatten_with_keys_fn is None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Container of the fields of a dataclass whose type is not registered with `torch.utils._pytree`, or of a size.

    Torch registers `torch.Size`, but rebuilds it as a tuple.
    """

    kind: type[Any]
    fields: dict[str, Any]

    @staticmethod
    def unflatten(values: Iterable[Any], context: tuple[type[Any], tuple[str, ...]]) -> Record:
        """Return a record of these values; `context` is the type of the dataclass and the names of the fields."""
        return Record(context[0], dict(zip(context[1], values, strict=True)))

    def restore(self, call: Call) -> Any:
        """Return the dataclass with these fields, or the size; `call` as for `restore_objects`."""
        if self.kind is torch.Size:
            return torch.Size(self.fields.values())
        # As in `copy.copy`, `__init__` is not called. `object.__setattr__` also sets fields of frozen dataclasses.
        instance: Any = object.__new__(self.kind)
        for name, value in self.fields.items():
            object.__setattr__(instance, name, restore_objects(value, call))
        return instance


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.fields.values()), (record.kind, tuple(record.fields))),
    Record.unflatten,
    serialized_type_name="autoshard.capture.python.returned_objects.Record",
    flatten_with_keys_fn=lambda record: (
        [(pytree.GetAttrKey(name), value) for name, value in record.fields.items()],
        (record.kind, tuple(record.fields)),
    ),
)


def record_objects(tree: Any) -> Any:
    """Return the tree with a `Record` for every size, and for every dataclass whose type is not registered."""
    # Without any, return the tree itself, without copying containers.
    if not any(map(_is_recorded, pytree.tree_leaves(tree, is_leaf=_is_size))):
        return tree
    return pytree.tree_map(lambda leaf: _record(leaf) if _is_recorded(leaf) else leaf, tree, is_leaf=_is_size)


def _is_size(node: Any) -> bool:
    return isinstance(node, torch.Size)


def _is_recorded(leaf: Any) -> bool:
    return _is_size(leaf) or _is_dataclass(leaf)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict, list, tuple))


def _record(leaf: Any) -> Record:
    if _is_size(leaf):
        return Record(torch.Size, {str(dim): size for dim, size in enumerate(leaf)})
    # A field with `init=False` may never have been set.
    names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    return Record(type(leaf), {name: record_objects(getattr(leaf, name)) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is not a tensor."""

    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call in its output: its position, or its keyword."""

    key: int | str

    def of(self, call: Call) -> Any:
        """Return the argument of a call."""
        args, kwargs = call
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


def restore_objects(tree: Any, call: Call) -> Any:
    """Restore the objects that `record_objects` replaced, and the arguments of a call."""

    def restore(leaf: Any) -> Any:
        if isinstance(leaf, Record):
            return leaf.restore(call)
        return leaf.of(call) if isinstance(leaf, Argument) else leaf

    return pytree.tree_map(restore, tree, is_leaf=lambda node: isinstance(node, Record))


def find_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, tuple[Argument, list[Any]]]:
    """Return the arguments that are objects of registered types, with their leaves, by identity.

    Builtin containers are excluded: calls may change them, and then return other ones.
    """
    passed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {
        id(value): (Argument(key), pytree.tree_leaves(value))
        for key, value in passed
        if type(value) in pytree.SUPPORTED_NODES and type(value).__module__ not in ("builtins", "collections")
    }


_GRAPH_VALUES = (torch.Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
_PLAIN = (bool, int, float, str, type(None))

_IMMUTABLE = (
    *(*_PLAIN, complex, bytes, range, type, type(...), enum.Enum, np.generic),
    *(torch.dtype, torch.layout, torch.memory_format),
)


def _is_plain(leaf: Any) -> bool:
    """Return True for a value that torch.export allows in an output; it allows no `enum.IntEnum` and the like."""
    return isinstance(leaf, _GRAPH_VALUES) or type(leaf) in _PLAIN


def _is_constant(leaf: Any) -> bool:
    """Return True for an immutable object without tensors that is equal on all ranks."""
    if isinstance(leaf, slice):
        return all(isinstance(part, _IMMUTABLE) for part in (leaf.start, leaf.stop, leaf.step))
    if isinstance(leaf, frozenset):
        return all(map(_is_constant, leaf))
    # Device indices differ between ranks.
    return leaf.index is None if isinstance(leaf, torch.device) else isinstance(leaf, _IMMUTABLE)


class OpaqueOutputs:
    """Replaces objects in an output by plain values, except tensors, plain values and known containers.

    Hugging Face models return their key-value cache besides the loss by default. A training step does not need it, and
    a graph only returns tensors. A cache that is an argument, and returned with the same tensors, is the caller's in
    every call. Immutable objects, such as a dtype, are the same in every call.

    Attributes:
        replaced: path in the output -> name of the replaced type.
        restored: path in the output -> the argument or constant at this path.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.restored: dict[str, Argument | Constant] = {}

    def replace(self, output: Any, passed: Mapping[int, tuple[Argument, list[Any]]]) -> Any:
        """Return the output with plain values for such objects; the output itself if it has no tensor.

        Args:
            output: of `forward`.
            passed: the arguments that are objects, from `find_objects` before the call.
        """
        recorded = _with_arguments(record_objects(output), passed)
        leaves = leaves_by_path(recorded)
        opaque = {leaf_name(path): leaf for path, leaf in leaves if not _is_plain(leaf)}
        # torch has an error message for an output without tensors.
        if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
            return output
        if not opaque:
            return recorded
        for name, leaf in opaque.items():
            if isinstance(leaf, Argument):
                self.restored[name] = leaf
            elif _is_constant(leaf):
                self.restored[name] = Constant(leaf)
            else:
                self.replaced[name] = type(leaf).__name__

        def plain(leaf: Any) -> Any:
            # A string, since outputs of transformers drop None. The layout of the result restores the object.
            if _is_plain(leaf):
                return leaf
            return "restored" if isinstance(leaf, Argument) or _is_constant(leaf) else None

        return pytree.tree_map(plain, recorded)

    def warn(self, model: str) -> None:
        """Warn of the replaced objects, if there are any."""
        if self.replaced:
            left_out = ", ".join(f"{path} ({kind})" for path, kind in self.replaced.items())
            warn_caller(
                f"{model} returns what no graph can hold: {left_out}. The parallelised module returns None there. Ask "
                "the model not to make it (Hugging Face: use_cache=False for the key-value cache), or register the "
                "type with torch.utils._pytree.register_pytree_node to keep it.",
            )


def _with_arguments(output: Any, passed: Mapping[int, tuple[Argument, list[Any]]]) -> Any:
    """Return the output with an `Argument` for every object that is an argument of `forward` with unchanged leaves."""

    def is_passed(node: Any) -> bool:
        if id(node) not in passed:
            return False
        before, now = passed[id(node)][1], pytree.tree_leaves(node)
        return len(before) == len(now) and all(map(operator.is_, before, now))

    if not passed:
        return output
    return pytree.tree_map(lambda leaf: passed[id(leaf)][0] if is_passed(leaf) else leaf, output, is_leaf=is_passed)
