"""Calls of a module as flat lists of tensors: layouts of arguments and results, names of tensors, keys of calls.

Results may hold what `torch.export` does not take: dataclasses, types registered without keys, and opaque objects.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import re
import warnings
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import pytree, storage_of
from autoshard.errors import InputError, warn_caller
from autoshard.names import matching

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
        # torch raises an error for types registered without keys, such as the outputs of diffusers: their parts get
        # the keys of a mapping, or positions.
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
    """Container of the fields of a dataclass whose type is not registered with `torch.utils._pytree`."""

    kind: type[Any]
    fields: dict[str, Any]

    @staticmethod
    def unflatten(values: Iterable[Any], context: tuple[type[Any], tuple[str, ...]]) -> Record:
        """Return a record of these values; `context` is the type of the dataclass and the names of the fields."""
        return Record(context[0], dict(zip(context[1], values, strict=True)))

    def restore(self, call: Call) -> Any:
        """Return the dataclass with these fields; `call` as for `restore_objects`."""
        # As by `copy.copy`, `__init__` is not called. `object.__setattr__` sets fields of frozen dataclasses, too.
        instance: Any = object.__new__(self.kind)
        for name, value in self.fields.items():
            object.__setattr__(instance, name, restore_objects(value, call))
        return instance


pytree.register_pytree_node(
    Record,
    lambda record: (list(record.fields.values()), (record.kind, tuple(record.fields))),
    Record.unflatten,
    serialized_type_name="autoshard.capture.call_layout.Record",
    flatten_with_keys_fn=lambda record: (
        [(pytree.GetAttrKey(name), value) for name, value in record.fields.items()],
        (record.kind, tuple(record.fields)),
    ),
)


def record_dataclasses(tree: Any) -> Any:
    """Return the tree with a `Record` for every dataclass whose type is not registered."""
    # The tree itself, without a copy of its containers, if there are no dataclasses.
    if not any(map(_is_dataclass, pytree.tree_leaves(tree))):
        return tree
    return pytree.tree_map(lambda leaf: _record(leaf) if _is_dataclass(leaf) else leaf, tree)


def _is_dataclass(leaf: Any) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict, list, tuple))


def _record(leaf: Any) -> Record:
    # A field with `init=False` may never have been set.
    names = [field.name for field in dataclasses.fields(leaf) if hasattr(leaf, field.name)]
    return Record(type(leaf), {name: record_dataclasses(getattr(leaf, name)) for name in names})


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a call, in an output that holds it: its position, or its keyword."""

    key: int | str

    def of(self, call: Call) -> Any:
        """Return the argument of a call."""
        args, kwargs = call
        return args[self.key] if isinstance(self.key, int) else kwargs[self.key]


def restore_objects(tree: Any, call: Call) -> Any:
    """Return the tree with the dataclasses that `record_dataclasses` replaced, and the arguments of a call."""

    def restore(leaf: Any) -> Any:
        if isinstance(leaf, Record):
            return leaf.restore(call)
        return leaf.of(call) if isinstance(leaf, Argument) else leaf

    return pytree.tree_map(restore, tree, is_leaf=lambda node: isinstance(node, Record))


def find_objects(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[int, tuple[Argument, list[Any]]]:
    """Return the arguments that are objects of registered types, with their leaves, by identity.

    Builtin containers are left out: calls may change them, and then return other ones.
    """
    passed: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {
        id(value): (Argument(key), pytree.tree_leaves(value))
        for key, value in passed
        if type(value) in pytree.SUPPORTED_NODES and type(value).__module__ not in ("builtins", "collections")
    }


_PLAIN = (torch.Tensor, bool, int, float, str, torch.SymInt, torch.SymFloat, torch.SymBool, type(None))


class OpaqueOutputs:
    """Replacement, by plain values, of objects in an output other than tensors, plain values and known containers.

    Hugging Face models return their key-value cache beside the loss by default. A training step has no use for it, and
    a graph returns tensors alone. A cache that a call was given, and returns with the tensors that it had, is that of
    the caller in every call.

    Attributes:
        replaced: path in the output -> name of the type that was replaced.
        arguments: path in the output -> the argument that stands there.
    """

    def __init__(self) -> None:
        self.replaced: dict[str, str] = {}
        self.arguments: dict[str, Argument] = {}

    def replace(self, output: Any, passed: Mapping[int, tuple[Argument, list[Any]]]) -> Any:
        """Return the output with plain values for such objects; the output itself if no tensor would be left.

        Args:
            output: of `forward`.
            passed: the objects that it was given, as `find_objects` returns them, before the call.
        """
        recorded = _with_arguments(record_dataclasses(output), passed)
        leaves = leaves_by_path(recorded)
        opaque = {leaf_name(path): leaf for path, leaf in leaves if not isinstance(leaf, _PLAIN)}
        # torch has a message of its own for an output without any tensor.
        if not any(isinstance(leaf, torch.Tensor) for _, leaf in leaves):
            return output
        if not opaque:
            return recorded
        arguments = {name: leaf for name, leaf in opaque.items() if isinstance(leaf, Argument)}
        self.arguments |= arguments
        self.replaced |= {name: type(leaf).__name__ for name, leaf in opaque.items() if name not in arguments}

        def plain(leaf: Any) -> Any:
            # A text, as outputs of transformers drop what is None. The layout of the result has the argument again.
            if isinstance(leaf, Argument):
                return str(leaf.key)
            return leaf if isinstance(leaf, _PLAIN) else None

        return pytree.tree_map(plain, recorded)

    def warn(self, model: str) -> None:
        """Warn of the replaced objects, if there are any."""
        if self.replaced:
            left_out = ", ".join(f"{path} ({kind})" for path, kind in self.replaced.items())
            warnings.warn(
                f"{model} returns what no graph can hold: {left_out}. The parallelised module returns None there. Ask "
                "the model not to make it (Hugging Face: use_cache=False for the key-value cache), or register the "
                "type with torch.utils._pytree.register_pytree_node to keep it.",
                stacklevel=2,
            )


def _with_arguments(output: Any, passed: Mapping[int, tuple[Argument, list[Any]]]) -> Any:
    """Return the output with an `Argument` for every object that `forward` was given and whose leaves are the same."""

    def is_passed(node: Any) -> bool:
        if id(node) not in passed:
            return False
        before, now = passed[id(node)][1], pytree.tree_leaves(node)
        return len(before) == len(now) and all(map(operator.is_, before, now))

    if not passed:
        return output
    return pytree.tree_map(lambda leaf: passed[id(leaf)][0] if is_passed(leaf) else leaf, output, is_leaf=is_passed)


InputInfo = TypeVar("InputInfo")


def signature_of(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], grad: bool) -> Hashable:
    """Return a key of everything in a call that the captured graph depends on.

    Args:
        module: the called module; its training flags and frozen parameters count.
        args: positional arguments, tensors (global shapes) or plain values, nested as `torch.utils._pytree` knows.
        kwargs: keyword arguments, in any order.
        grad: True if gradients are wanted.

    Returns:
        A hashable key: structure, shape, dtype and `requires_grad` of tensors, plain values, module state, autocast,
        default dtype.

    Raises:
        InputError: a plain value cannot be hashed.
    """
    keys = tuple(sorted(kwargs))
    leaves = (*(_leaf(value) for value in args), *(_leaf(kwargs[key]) for key in keys))
    return (len(args), keys, leaves, grad, _module_state(module), _surrounding_dtypes())


def _leaf(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        # The program of a `DTensor` takes it as it lies.
        return (value.shape, value.dtype, value.requires_grad, isinstance(value, DTensor))
    # As text, nan is equal to nan, and 0.0 is not -0.0.
    if isinstance(value, float):
        return (type(value), repr(value))
    # The type counts: True, 1 and 1.0 are equal in Python, and lead to different graphs.
    if value is None or isinstance(value, (bool, int, str)):
        return (type(value), value)
    leaves, structure = pytree.tree_flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        try:
            hash(value)
        except TypeError as error:
            raise InputError(
                f"an argument of type {type(value).__name__} is neither a tensor, nor a plain value, nor a container "
                "that torch.utils._pytree knows. Register the type there, or pass its tensors."
            ) from error
        return (type(value), value)
    return (structure, tuple(_leaf(leaf) for leaf in leaves))


def _module_state(module: nn.Module) -> tuple[bool, ...]:
    """Return the training flag of every submodule and `requires_grad` of every parameter."""
    # Every call of a parallelised module comes here: `modules()` and `parameters()`, which build names and sets of
    # visited objects, would take several times as long.
    flags: list[bool] = []
    waiting = [module]
    for current in waiting:  # the list grows in the loop
        flags.append(current.training)
        if current._parameters:
            flags += [parameter.requires_grad for parameter in current._parameters.values() if parameter is not None]
        if current._modules:
            waiting += [child for child in current._modules.values() if child is not None]
    return tuple(flags)


def _surrounding_dtypes() -> Hashable:
    """Return the default dtype, in which tensors are made and integers divided, and the dtypes of autocast."""
    casts = (
        (device, torch.get_autocast_dtype(device)) for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)
    )
    return (torch.get_default_dtype(), *casts)


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf that is not a tensor."""

    value: Any


@dataclass(frozen=True, slots=True)
class CallLayout:
    """The flattening of the arguments of a call to its tensors.

    Attributes:
        structure: of `(args, kwargs)`.
        keywords: the names of the keyword arguments, in the order of the structure.
        leaves: in flattening order, the name of each tensor and the value of each other leaf.
    """

    structure: pytree.TreeSpec
    keywords: tuple[str, ...]
    leaves: tuple[str | Constant, ...]

    def flatten(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors of a call, in the order in which they were captured.

        Raises:
            InputError: the call has another structure, or other values that are not tensors.
        """
        if kwargs.keys() != set(self.keywords):
            raise InputError(
                f"captured with keyword arguments {_join_names(self.keywords)}, called with "
                f"{_join_names(tuple(kwargs))}: this graph serves only the first."
            )
        leaves, structure = pytree.tree_flatten((args, {key: kwargs[key] for key in self.keywords}))
        if structure != self.structure:
            raise InputError(f"captured with arguments nested as {self.structure}, called with {structure}.")
        tensors = []
        for leaf, expected in zip(leaves, self.leaves, strict=True):
            if isinstance(expected, str):
                if not isinstance(leaf, torch.Tensor):
                    raise InputError(f"{expected} was a tensor when captured, and is {leaf!r} in this call.")
                tensors.append(leaf)
            elif isinstance(leaf, torch.Tensor) or _leaf(leaf) != _leaf(expected.value):
                kind = "a tensor" if isinstance(leaf, torch.Tensor) else repr(leaf)
                raise InputError(
                    f"an argument was {expected.value!r} when captured, and is {kind} in this call: capture it again."
                )
        return tensors


def call_layout(module: nn.Module, structure: pytree.TreeSpec, leaves: list[Any]) -> CallLayout:
    """Return the layout of a call from the structure and the leaves of `(args, kwargs)`."""
    example = structure.unflatten(range(structure.num_leaves))
    # Of the class: `forward` of the module itself may be wrapped, by this library or another one.
    parameters = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [parameter.name for parameter in parameters if parameter.kind in kinds][1:]  # without `self`
    positional += [f"args[{index}]" for index in range(len(positional), len(example[0]))]
    named = zip(_leaf_names(positional, example), leaves, strict=True)
    layout = tuple(name if isinstance(leaf, torch.Tensor) else Constant(leaf) for name, leaf in named)
    return CallLayout(structure, tuple(example[1]), layout)


def call_tensors(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a call by name."""
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    names = call_layout(module, structure, leaves).leaves
    return {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}


def _leaf_names(positional: Sequence[str], call: Any) -> Iterator[str]:
    """Yield names such as `input_ids` or `batch['x'][0]` of the leaves of `(args, kwargs)`."""
    for path, _ in leaves_by_path(call):
        # The first key of a path chooses between `args` and `kwargs`, the second the argument.
        first, rest = path[1], path[2:]
        head = positional[first.idx] if isinstance(first, pytree.SequenceKey) else str(first.key)
        yield head + pytree.keystr(rest)


def without_omitted_arguments(
    module: nn.Module, inputs: Mapping[str, InputInfo], passed: Container[str]
) -> dict[str, InputInfo]:
    """Return what is said of inputs by name or glob, without arguments of `forward` that a call omits, as labels."""
    arguments = inspect.signature(type(module).forward).parameters
    # Names that are not arguments stay, for an error to name them.
    return {
        name: info
        for name, info in inputs.items()
        if name in passed or not matching(re.split(r"[.\[]", name)[0], arguments)
    }


def _join_names(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"


@dataclass(frozen=True, slots=True)
class Attribute:
    """A tensor that `forward` leaves in an attribute, a container or a variable.

    Attributes:
        name: as a user writes it, such as `self.layers.0.auxiliary_loss`.
        differentiable: True if gradients flow into it.
    """

    name: str
    differentiable: bool


@dataclass(frozen=True, slots=True)
class RuntimeCheck:
    """A flag that a run computes, and the value that the captured graph assumes.

    Attributes:
        line: the user's line that reads it, such as `model.py:12 (if not x.isfinite().all():)`.
        wanted: the value that the graph assumes.
        message: of the error that the line raises otherwise; empty where it takes another branch.
        error: the type of that error.
        decides: True if anything that `forward` computes or leaves behind depends on the flag.
    """

    line: str
    wanted: bool
    message: str = ""
    error: type[Exception] = InputError
    decides: bool = True

    def fail(self) -> None:
        """Raise the error of a run in which the flag has another value; warn where nothing depends on it."""
        if not self.decides:
            warn_caller(
                f"{self.line} asks for numbers that forward computes, and the answer is {not self.wanted} in this "
                "call. Nothing that is computed depends on it. What the line does then, such as a warning, is left out."
            )
            return
        if self.message:
            raise self.error(f"{self.message} ({self.line})")
        raise self.error(
            f"{self.line} asks for numbers that forward computes. The graph was captured for the answer "
            f"{self.wanted}, which all ordinary numbers give, and in this call it is {not self.wanted}: look for what "
            "is not finite, or too large, in the inputs and the parameters. Where both answers are to be served, write "
            "the branch as torch.where."
        )


@dataclass(frozen=True, slots=True)
class OutputView:
    """An output that is a view of an input or a buffer.

    Attributes:
        kind: `"input"` or `"buffer"`.
        name: the name of the input or buffer.
        layout: sizes, strides and offset of the view, for a contiguous input or buffer; None: the whole tensor itself.
    """

    kind: str
    name: str
    layout: tuple[tuple[int, ...], tuple[int, ...], int] | None

    def of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the view of an input or buffer; None if that has another layout in memory than at the capture."""
        if self.layout is None:
            return tensor
        # The strides of the view are those in a contiguous tensor.
        if not tensor.is_contiguous():
            return None
        size, stride, offset = self.layout
        return tensor.as_strided(size, stride, tensor.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class ResultLayout:
    """The order of a flat list of output tensors: returned tensors, then attributes, then flags of checks.

    Attributes:
        structure: of the object that `forward` returned.
        leaves: in flattening order, the name of each returned tensor, the value of each other leaf, and the arguments
            that are returned as they are.
        attributes: the tensors that `forward` leaves in Python.
        checks: of the run, one flag each.
        views: outputs in the memory of an input or a buffer, by name.
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
        """Raise the error of the first check that does not hold, or warn."""
        if not self.checks:
            return
        # Stacked, all flags come from the device with one synchronisation.
        flags = torch.stack([tensor.detach() for tensor in tensors[-len(self.checks) :]]).tolist()
        for check, flag in zip(self.checks, flags, strict=True):
            if flag is not check.wanted:
                check.fail()

    def unflatten(self, tensors: list[Any], call: Call = ((), {})) -> Any:
        """Return the user's output object with these tensors in it, and with the arguments of the call."""
        assert len(tensors) == len(self.names), f"{len(self.names)} output tensors were captured, got {len(tensors)}"
        remaining = iter(tensors)
        leaves = [
            next(remaining) if isinstance(leaf, str) else leaf.value if isinstance(leaf, Constant) else leaf
            for leaf in self.leaves
        ]
        return restore_objects(self.structure.unflatten(leaves), call)

    def assigned_tensors(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return, of all output tensors, those that `forward` leaves in Python."""
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
    """Yield the names of outputs that are views of a buffer or an input, with these views.

    Args:
        outputs: nodes of an exported graph, in which tensors are changed in place.
        sources: kinds, names and placeholders of the inputs of the graph.
    """
    held = {
        storage_of(node.meta["val"]): (kind, name, node.meta["val"])
        for kind, name, node in sources
        if kind in ("input", "buffer")
    }
    for output, node in outputs.items():
        value = node.meta["val"]
        kind, name, source = held.get(storage_of(value), ("", "", value))
        # A view of another dtype, such as `view_as_real`, has no strides in the tensor that it is a view of.
        if not kind or value.dtype != source.dtype:
            continue
        layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset())
        source_layout = (tuple(source.shape), tuple(source.stride()), source.storage_offset())
        # As texts: a comparison of symbolic sizes would be recorded as a condition on them.
        if str(layout) == str(source_layout):
            yield output, OutputView(kind, name, None)
        elif all(isinstance(number, int) for number in (*layout[0], *layout[1], layout[2])):
            yield output, OutputView(kind, name, layout)
