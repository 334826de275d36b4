"""Results that a compiled program never makes, since the kernels that read them compute them.

A compiler joins operators that compute number by number, and the sums that end such a chain, into kernels. What is read
inside of such kernels alone is never in memory. The rule here is simpler than a compiler's: a result of an operator that
computes number by number exists only where an operator reads it that is no part of such kernels, or where too much would
have to be read to compute it again. So what is made of the results that exist is computed where it is read, and these
are held until then.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import fx

from autoshard.capture.operators import define
from autoshard.program.aliasing import storage_root, view_source
from autoshard.specs.emitter import collectives

_aten = torch.ops.aten

# As inductor's `realize_acc_reads_threshold` and `realize_reads_threshold`: of so many results one is computed where it
# is read, and where several operators read it.
_MOST_SOURCES, _MOST_SHARED_SOURCES = 8, 4

# What torch does not tag as pointwise. Of norms, softmax and losses, the numbers of the result are computed of the
# operands and of sums over them.
_INLINED = frozenset(
    getattr(_aten, name)
    for name in (
        *("_to_copy", "where", "copy", "fill", "index", "_unsafe_index", "gather", "index_select", "embedding"),
        *("constant_pad_nd", "flip", "repeat", "roll", "select_backward", "slice_backward", "select_scatter"),
        *("slice_scatter", "arange", "full", "full_like", "ones", "zeros", "zeros_like", "ones_like", "new_ones"),
        *("new_zeros", "new_full", "scalar_tensor", "reshape", "_softmax", "_softmax_backward_data", "_log_softmax"),
        *("_log_softmax_backward_data", "nll_loss_backward", "mse_loss_backward", "native_layer_norm"),
        *("native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training", "native_batch_norm_backward"),
    )
)
# They are made, by the kernels that make what they read. Compiled programs reduce a copy in place.
_ENDS = frozenset(
    (
        *(_aten.nll_loss_forward, _aten.mse_loss, _aten.binary_cross_entropy_with_logits, _aten.var_mean, _aten.cat),
        collectives.all_reduce,
    )
)
# Kernels write over what these make, if nothing reads it later; not over what operators unknown to a compiler make.
_WRITTEN_OVER = frozenset((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution))

_CAT = _aten.cat.default
join = define("join(Tensor[] parts, int dim) -> Tensor", torch.cat, torch.cat)
"""`join(parts, dim)`: `torch.cat`, which a compiler leaves as it is.

Compilers write each part where it is joined as soon as it is made: the buffer of many gradients is there with the first.
"""


def keep_joins(graph: fx.Graph) -> None:
    """Have a compiler join the parts of what a collective takes when all of them are made."""
    for node in graph.find_nodes(op="call_function", target=_CAT):
        if _is_sent(node):
            node.target = join


def _is_sent(node: fx.Node) -> bool:
    return any(getattr(reader.target, "namespace", "") == "_c10d_functional" for reader in _readers(node))


def _packet(op: Any) -> Any:
    return getattr(op, "overloadpacket", None)


@cache
def _is_inlined(op: Any) -> bool:
    """Return True if the numbers of an operator's result may be computed where they are read."""
    return torch.Tag.pointwise in getattr(op, "tags", ()) or _packet(op) in _INLINED


@cache
def _fuses(op: Any) -> bool:
    return _is_inlined(op) or torch.Tag.reduction in getattr(op, "tags", ()) or _packet(op) in _ENDS


def fuses(call: fx.Node) -> bool:
    """Return True if a compiler computes a call in the kernels of what it reads."""
    return call.op == "call_function" and _fuses(call.target) and not (call.target is _CAT and _is_sent(call))


def maker(node: fx.Node) -> fx.Node:
    """Return the call that makes a result, which is the node itself but for one of several results."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def unmade_results(graph: fx.Graph) -> dict[fx.Node, frozenset[fx.Node]]:
    """Return the results of a half that are never made -> the results and inputs of which they are computed."""
    unmade: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta["val"], torch.Tensor):
            continue
        call, readers = maker(node), set(_readers(node))
        if _is_added(node, readers) or (_is_inlined(call.target) and view_source(node) is None and not _is_sum(node)):
            sources = sources_of(call, unmade)
            most = _MOST_SHARED_SOURCES if len(readers) > 1 else _MOST_SOURCES
            if all(map(fuses, readers)) and len(sources) <= most:
                unmade[node] = sources
    return unmade


def _is_added(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return True if a product is made with the matrix that is added to it, where it is added."""
    if node.target is not _aten.mm.default or len(readers) != 1:
        return False
    (reader,) = readers
    return reader.target is _aten.add.Tensor and len(reader.all_input_nodes) == 2 and len(node.users) == 1 and reader in node.users


def _is_sum(node: fx.Node) -> bool:
    """Return True if a call adds a matrix to a product, and is made with it."""
    return node.target is _aten.add.Tensor and any(
        _is_added(source, set(_readers(source))) for source in node.all_input_nodes
    )


def sources_of(call: fx.Node, unmade: Mapping[fx.Node, frozenset[fx.Node]]) -> frozenset[fx.Node]:
    """Return the results and inputs that exist and that a kernel reads for a call."""
    found: set[fx.Node] = set()
    for source in call.all_input_nodes:
        root = storage_root(source)
        found |= unmade.get(root, {root})
    return frozenset(found)


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls that read a result, or a view of it, and the output."""
    for user in node.users:
        if user.op == "call_function" and view_source(user) is not None:
            yield from _readers(user)
        else:
            yield user


def may_be_written_over(node: fx.Node) -> bool:
    """Return True if a kernel may write its result over this one, which it reads last."""
    call = maker(node)
    return fuses(call) or _packet(call.target) in _WRITTEN_OVER
