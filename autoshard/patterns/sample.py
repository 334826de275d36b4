"""The arguments of `check`: an operator by any of its names, and a sample call of it in any common form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from autoshard.errors import RuleError
from autoshard.patterns._torch import CustomOpDef, OpOverload, OpOverloadPacket, overload_for
from autoshard.patterns.registry import OPERATOR_NAME

Operator = OpOverload | OpOverloadPacket | CustomOpDef | str


def sample_call(
    op: Operator, sample: Any, kwargs: Mapping[str, Any] | None = None
) -> tuple[OpOverload, tuple[Any, ...], dict[str, Any]]:
    """Return the operator, arguments and keyword arguments of one call, tensors detached.

    Args:
        op: an overload, a packet of overloads (the overload that takes the arguments is used), the result of
            `torch.library.custom_op`, or a name such as `"mylib::op"` or `"aten.sum.dim_IntList"`.
        sample: the arguments; or a pair of arguments and keyword arguments; or torch's `SampleInput`; or one tensor.
        kwargs: further keyword arguments.

    Raises:
        RuleError: there is no such operator, no overload takes the arguments, or it changes its operands.
    """
    args, keywords = _arguments(sample)
    args, keywords = _detach(args), _detach({**keywords, **(kwargs or {})})
    overload = _overload(op, args, keywords)
    if overload._schema.is_mutable:
        raise RuleError(
            f"{overload} changes its operands. Captured graphs are functional: write and check the rule of the "
            "operator that returns the new value instead."
        )
    return overload, args, keywords


def _arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(sample, torch.Tensor):
        return (sample,), {}
    if hasattr(sample, "input") and hasattr(sample, "args"):  # SampleInput, without importing torch's test suite
        return (sample.input, *sample.args), dict(sample.kwargs)
    if not isinstance(sample, Sequence) or isinstance(sample, str):
        raise RuleError(
            f"a sample of type {type(sample).__name__} says nothing of a call: pass the arguments as a tuple, a pair "
            "(args, kwargs), or torch's SampleInput."
        )
    if len(sample) == 2 and isinstance(sample[0], (tuple, list)) and isinstance(sample[1], Mapping):
        return tuple(sample[0]), dict(sample[1])
    return tuple(sample), {}


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, (tuple, list)):
        return type(value)(_detach(item) for item in value)
    if isinstance(value, dict):
        return {name: _detach(item) for name, item in value.items()}
    return value


def _overload(op: Operator, args: Sequence[Any], kwargs: Mapping[str, Any]) -> OpOverload:
    if isinstance(op, CustomOpDef):
        return op._opoverload
    packet = _operator_by_name(op) if isinstance(op, str) else op
    if isinstance(packet, OpOverload):
        return packet
    names = packet.overloads()
    if len(names) == 1:
        return getattr(packet, names[0])
    try:
        return overload_for(packet, args, kwargs)
    except RuntimeError as error:
        raise RuleError(
            f"none of the overloads {', '.join(names)} of {packet} takes these arguments. Name the one that is meant, "
            f'such as "{packet}.{names[0]}", or mend the arguments: {str(error).splitlines()[0]}'
        ) from error


def _operator_by_name(name: str) -> OpOverload | OpOverloadPacket:
    match = OPERATOR_NAME.fullmatch(name)
    if match is None:
        raise RuleError(
            f'"{name}" is not the name of an operator: write "namespace::name" or "namespace.name.overload".'
        )
    try:
        packet = getattr(getattr(torch.ops, match["namespace"]), match["name"])
        return packet if match["overload"] is None else getattr(packet, match["overload"])
    except (AttributeError, RuntimeError) as error:
        raise RuleError(
            f'torch knows no operator "{name}": import the module that defines it first, or mend the name.'
        ) from error
