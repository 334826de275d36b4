"""Weight normalisation: the direction of a weight and its length, one number per slice of the dim `dim`.

The other dims may be sharded as well: the ranks then exchange sums of one number per slice.
"""

from __future__ import annotations

from typing import Any

from autoshard.patterns.local import LocalCall
from autoshard.patterns.notation import bind
from autoshard.patterns.ops._helpers import (
    accumulation_dtype,
    all_reduce_over,
    bind_named,
    cast,
    cast_results,
    factor_names,
    named_values,
    shape_of,
    split_axes,
)
from autoshard.patterns.ops._positions import localize_index
from autoshard.patterns.ops.scattering import append_spare, drop_spare
from autoshard.patterns.registry import rule_maker
from autoshard.patterns.rule import OpCall, Rule


def _names(call: OpCall, tensor: str) -> tuple[str, str, list[str]]:
    """Dims of the weight, dims of its lengths, and the names of the dims that are summed over."""
    rank = len(shape_of(call, tensor))
    names = factor_names("d", rank)
    kept = call.arg("dim") % rank
    lengths = ["o" if dim == kept else "1" for dim in range(rank)]
    return (
        " ".join("o" if dim == kept else name for dim, name in enumerate(names)),
        " ".join(lengths),
        [name for dim, name in enumerate(names) if dim != kept],
    )


@rule_maker("aten._weight_norm_interface")
def weight_norm(call: OpCall) -> Rule:
    """The weight `v · g / |v|`, and the lengths `|v|`."""
    weight, lengths, summed = _names(call, "v")
    size = shape_of(call, "v")[call.arg("dim")]
    return bind_named(
        call,
        {"v": weight, "g": lengths},
        [weight, lengths],
        reduce=dict.fromkeys(summed),
        exchange=dict.fromkeys(summed, 4 * size),
        local=_weight_norm,
        uneven=True,
        fill=dict.fromkeys(summed, 0.0),
    )


def _row_sum(call: LocalCall, tensor: str, value: Any) -> Any:
    """Sum over all dims but the one that is kept, other ranks included; dims of size one stay."""
    _, _, summed = _names(call.call, tensor)
    rank = len(summed) + 1
    dims = [dim for dim in range(rank) if dim != call.arg("dim") % rank]
    return all_reduce_over(call, call.emit.sum(value, dims, True), summed)


def _weight_norm(call: LocalCall) -> Any:
    if not split_axes(call, _names(call.call, "v")[2]):
        return call.run()
    emit, values = call.emit, named_values(call)
    v, g = (cast(call, values[name], accumulation_dtype(values[name].dtype)) for name in ("v", "g"))
    lengths = emit.sqrt(_row_sum(call, "v", v * v))
    weight = v * (g / lengths)
    return cast_results(call, [weight, lengths])


@rule_maker("aten._weight_norm_interface_backward")
def weight_norm_backward(call: OpCall) -> Rule:
    """Gradients of direction and length, linear in the incoming one."""
    weight, lengths, summed = _names(call, "saved_v")
    size = shape_of(call, "saved_v")[call.arg("dim")]
    return bind_named(
        call,
        {"grad_w": weight, "saved_v": weight, "saved_g": lengths, "saved_norms": lengths},
        [weight, lengths],
        linear=[{"grad_w"}],
        reduce=dict.fromkeys(summed),
        exchange=dict.fromkeys(summed, 4 * size),
        local=_weight_norm_backward,
        uneven=True,
        fill=dict.fromkeys(summed, 0.0),
    )


def _weight_norm_backward(call: LocalCall) -> Any:
    """`grad_g = sum(grad · v) / |v|` and `grad_v = g / |v| · (grad - v · grad_g / |v|)`."""
    if not split_axes(call, _names(call.call, "saved_v")[2]):
        return call.run()
    values = named_values(call)
    gradient, v, g, lengths = (
        cast(call, values[name], accumulation_dtype(values[name].dtype))
        for name in ("grad_w", "saved_v", "saved_g", "saved_norms")
    )
    total = _row_sum(call, "saved_v", gradient * v)
    grad_g = total / lengths
    along = v * (grad_g / lengths)
    across = gradient - along
    grad_v = across * (g / lengths)
    return cast_results(call, [grad_v, grad_g])


# Rows that are scaled down to a largest norm: each on its own, and each needed whole.


@rule_maker("aten.renorm")
def _renorm(call: OpCall) -> Rule:
    """Slices along one dim."""
    ndim = len(call.operands[0].shape)
    kept = call.arg("dim") % ndim
    dims = " ".join(f"d{dim}" if dim == kept else f"d{dim}!" for dim in range(ndim))
    return bind(f"{dims} -> {dims}", call)


@rule_maker("aten.embedding_renorm")
def _embedding_renorm(call: OpCall) -> Rule:
    """Rows of a table that the indices name; a rank of a sharded table scales its own."""
    return bind("v^ d!, ...! -> v d!", call, local=_local_embedding_renorm)


def _local_embedding_renorm(call: LocalCall) -> Any:
    if not call.axes("v"):
        return call.run()
    table, indices = call.operands
    stretch = call.operand_shape(0)[0]
    place, _ = localize_index(call, indices, "v", stretch, stretch)
    return drop_spare(call, call.run(operands=[append_spare(call, table, [0]), place]), [0])
