"""Results that a compiled program never materialises, since the kernels that read them compute them.

A compiler fuses element-wise operators, and sums over their results, into kernels. Results read only by such kernels
are not in memory: every kernel computes them from tensors in memory, which are held until then. The rule here is
simpler than a compiler's: the result of an element-wise operator is materialised only if another kind of operator reads
it, or if it is computed from many tensors. torch/_inductor/ir.py shows how inductor lowers graphs.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import fx

from autoshard.operator_library import KERNELS, define
from autoshard.program.aliasing import storage_root, view_source
from autoshard.specs.emitter import collectives

_aten = torch.ops.aten

# As inductor's `realize_acc_reads_threshold` and `realize_reads_threshold`.
_MOST_SOURCES = 8
MOST_SHARED_SOURCES = 4
"""Most tensors from which a result with several readers is computed where it is read."""

# Element-wise operators that torch does not tag as pointwise.
_POINTWISE = frozenset(
    getattr(_aten, name)
    for name in (
        *("_to_copy", "where", "copy", "fill", "index", "_unsafe_index", "gather", "index_select", "embedding"),
        *("constant_pad_nd", "flip", "repeat", "roll", "select_backward", "slice_backward", "select_scatter"),
        *("slice_scatter", "arange", "full", "full_like", "ones", "zeros", "zeros_like", "ones_like", "new_ones"),
        *("new_zeros", "new_full", "scalar_tensor", "reshape"),
    )
)
# Their results are computed element-wise from operands and materialised sums over these.
_NORMS = frozenset(
    getattr(_aten, name)
    for name in (
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "nll_loss_backward"),
        *("mse_loss_backward", "native_layer_norm", "native_layer_norm_backward", "native_group_norm"),
        *("native_group_norm_backward", "_native_batch_norm_legit_functional"),
        *("_native_batch_norm_legit_no_training", "native_batch_norm_backward"),
    )
)
# Materialised, by the kernels of their operands. Compiled programs reduce a copy in place.
_ENDS = frozenset(
    (
        *(_aten.nll_loss_forward, _aten.mse_loss, _aten.binary_cross_entropy_with_logits, _aten.var_mean, _aten.cat),
        collectives.all_reduce,
    )
)
# Separate kernels, whose results may be overwritten.
_PRODUCTS = frozenset((_aten.mm, _aten.addmm, _aten.bmm, _aten.baddbmm, _aten.convolution))

_CAT = _aten.cat.default
join = define("join(Tensor[] parts, int dim) -> Tensor", torch.cat, torch.cat)
"""`join(parts, dim)`: `torch.cat`, opaque to compilers.

Compilers write each part into the concatenation as soon as it is computed: a buffer of gradients would be allocated
with the first.
"""


def keep_joins(graph: fx.Graph) -> None:
    """Make a compiler concatenate the operand of a collective only when all of its parts exist."""
    for node in graph.find_nodes(op="call_function", target=_CAT):
        if _is_sent(node):
            node.target = join


def _is_sent(node: fx.Node) -> bool:
    return any(getattr(reader.target, "namespace", "") == "_c10d_functional" for reader in readers_of(node))


def _packet(op: Any) -> Any:
    return getattr(op, "overloadpacket", None)


@cache
def _is_pointwise(op: Any) -> bool:
    return torch.Tag.pointwise in getattr(op, "tags", ()) or _packet(op) in _POINTWISE


@cache
def _is_inlined(op: Any) -> bool:
    """Return True if an operator's result may be computed where it is read."""
    return _is_pointwise(op) or _packet(op) in _NORMS


@cache
def _fuses(op: Any) -> bool:
    return _is_inlined(op) or torch.Tag.reduction in getattr(op, "tags", ()) or _packet(op) in _ENDS


def is_made_apart(op: Any) -> bool:
    """Return True if an operator's result is computed by a separate kernel, except for a sum with it."""
    return _packet(op) in _PRODUCTS or op in KERNELS


def is_pointwise(node: fx.Node) -> bool:
    """Return True for a call of an element-wise operator."""
    return node.op == "call_function" and _is_pointwise(node.target)


def fuses(call: fx.Node) -> bool:
    """Return True if a compiler fuses a call with the kernels of its operands."""
    return call.op == "call_function" and _fuses(call.target) and not (call.target is _CAT and _is_sent(call))


def maker(node: fx.Node) -> fx.Node:
    """Return the call that computes a result: the node itself, or for `getitem`, its operand."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


class FusedResults:
    """The results that kernels of a compiled half compute where they read them.

    Args:
        graph: the half.

    Attributes:
        unmade: results that are never in memory.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.unmade: set[fx.Node] = set()
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in graph.nodes:
            if node.op == "call_function" and isinstance(node.meta["val"], torch.Tensor):
                self._add(node)

    def _add(self, node: fx.Node) -> None:
        call, readers = maker(node), set(readers_of(node))
        if not (
            _is_added(node, readers)
            or (_is_inlined(call.target) and view_source(node) is None and not _is_added_to(node))
        ):
            return
        # A collective gets a copy.
        fused = {reader for reader in readers if not _is_collective(reader)}
        sources = self.read_by(call)
        if all(map(fuses, fused)) and len(sources) <= (MOST_SHARED_SOURCES if len(readers) > 1 else _MOST_SOURCES):
            self._sources[node] = sources
            if len(fused) == len(readers):
                self.unmade.add(node)

    def read_by(self, call: fx.Node) -> frozenset[fx.Node]:
        """Return the results and inputs in memory that a kernel reads for a call."""
        found: set[fx.Node] = set()
        for root in map(storage_root, call.all_input_nodes):
            found |= {root} if _is_collective(call) else self._sources.get(root, {root})
        return frozenset(found)


def _is_added(node: fx.Node, readers: set[fx.Node]) -> bool:
    """Return True if the only reader of a product adds a matrix to it: both are computed together."""
    if node.target is not _aten.mm.default or len(readers) != 1 or not readers <= {*node.users}:
        return False
    (reader,) = readers
    return reader.target is _aten.add.Tensor and len(reader.all_input_nodes) == 2


def _is_added_to(node: fx.Node) -> bool:
    """Return True if a call adds a matrix to a product, which is computed with it."""
    return node.target is _aten.add.Tensor and any(
        _is_added(source, set(readers_of(source))) for source in node.all_input_nodes
    )


def _is_collective(node: fx.Node) -> bool:
    # The kernel of an all-reduce makes the copy that it reduces.
    namespace, packet = getattr(node.target, "namespace", ""), _packet(node.target)
    return namespace == "_c10d_functional" and packet is not collectives.all_reduce


def readers_of(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the calls that read a result, or a view of it, and the output."""
    for user in node.users:
        if user.op == "call_function" and view_source(user) is not None:
            yield from readers_of(user)
        else:
            yield user


def writes_over(call: fx.Node) -> bool:
    """Return True if a call may overwrite with its result a tensor of the same size, as the last reader of it."""
    return fuses(call) and not _is_added_to(call)


def may_be_written_over(node: fx.Node) -> bool:
    """Return True if a kernel may overwrite this result; never results of unknown operators."""
    call = maker(node)
    return fuses(call) or _packet(call.target) in _PRODUCTS
