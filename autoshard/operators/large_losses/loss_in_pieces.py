"""The pattern of a loss of large logits in an exported graph, and its replacement by a loss in pieces.

Models multiply by a weight, cast, scale and bound the logits, drop some rows, flatten the others, and take
`cross_entropy`, or `log_softmax` and `nll_loss`. Where nothing else reads the logits, the same rows of the layer's
input are selected instead, and the operators of `loss_operator` never materialise whole logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.capture.nodes import argument_of, base_of, changed_memory, graphs_of
from autoshard.operators._torch import symbolic_hint
from autoshard.operators.large_losses.loss_operator import (
    cross_entropy_of_statistics,
    logsumexp_of_statistics,
    operators,
    statistics_of_logits,
)

aten = torch.ops.aten

LARGE_LOGITS = 2**30
"""Least logits on one device for a loss in pieces where no plan decides: 4 GiB in single precision.

With their temporaries they are then a fifth of an accelerator's memory. The memory of fewer is not worth the time of
pieces, which compute them twice. In elements, not bytes, so that the graph of a model is the same in every precision.
"""

Work = Mapping[torch.dtype, float]
"""Operations of all devices together, by dtype."""

FEW_LOGITS = 2**26
"""Most logits on one device for which a loss is never in pieces: their memory is not worth a second plan."""


def compute_large_losses_in_pieces(module: fx.GraphModule, devices: int, room: float | None = None) -> Work:
    """Replace the losses of an exported graph and its regions whose logits are too large for every one of `devices`.

    Args:
        module: the exported graph.
        devices: number of devices of the step.
        room: bytes of each device for the logits of a loss and their log-probabilities. If one needs more, all losses
            of more than `FEW_LOGITS` are replaced, else none. By default, those of `LARGE_LOGITS` are replaced.

    Returns:
        The operations that are done twice if all losses of more than `FEW_LOGITS` are in pieces; empty without such.
    """
    least = min(FEW_LOGITS, LARGE_LOGITS) * devices
    matches = [match for match in _matches(module) if match.elements >= least]
    if room is None:
        replaced = [match for match in matches if match.elements >= LARGE_LOGITS * devices]
    else:
        replaced = matches if any(match.whole_bytes > room * devices for match in matches) else []
    work: dict[torch.dtype, float] = {}
    for match in matches:
        dtype = _value(match.layer).dtype
        work[dtype] = work.get(dtype, 0.0) + 2.0 * match.elements * _hint(_value(match.layer.args[0]).shape[-1])
    for match in replaced:
        _replace(match)
    return work


def is_in_pieces(graph: fx.Graph) -> bool:
    """Return True if a traced graph has a loss in pieces."""
    return bool(graph.find_nodes(op="call_function", target=operators.logit_statistics.default))


def _matches(module: fx.GraphModule) -> Iterator[_Match]:
    """Yield the losses of an exported graph and its regions that may be in pieces."""
    for graph in graphs_of(module):
        for node in graph.nodes:
            if node.target in _LOSSES and _is_integer(_value(node.args[1])):
                match = _match(node)
                if match is not None:
                    yield match


def has_large_logits(graph: fx.Graph, devices: int) -> bool:
    """Return True if a traced graph has a loss of whole logits that could be in pieces for `devices`."""
    nodes = graph.find_nodes(op="call_function", target=aten._log_softmax.default)
    return any(_value(node).numel() >= LARGE_LOGITS * devices for node in nodes)


def returns_large_logits(graph: fx.Graph, outputs: Iterable[fx.Node], devices: int) -> bool:
    """Return True if a traced graph has such a loss, and its logits are whole because it returns them."""
    is_large = any(_value(node).numel() >= LARGE_LOGITS * devices for node in outputs)
    return is_large and has_large_logits(graph, devices)


@dataclass(slots=True)
class _Match:
    """A loss of the logits of a linear layer.

    Attributes:
        loss: the node of the loss.
        layer: the product that makes the logits.
        path: the nodes from after `layer` to the first operand of `loss`, in order.
        moves: those that select rows or move dims; the others are element-wise.
        scale, cap: the logits are `cap * tanh(scale * product)`, or `scale * product` if `cap` is 0.
        penalties: nodes of `logsumexp` that read the same logits as the loss.
    """

    loss: fx.Node
    layer: fx.Node
    path: list[fx.Node]
    moves: list[fx.Node] = field(default_factory=list)
    scale: float = 1.0
    cap: float = 0.0
    penalties: list[fx.Node] = field(default_factory=list)

    @property
    def first(self) -> fx.Node:
        """The first node that reads the logits."""
        return min([self.loss, *self.penalties])

    @property
    def elements(self) -> int:
        """The number of logits in the example call."""
        return math.prod(_hint(size) for size in _value(self.loss.args[0]).shape)

    @property
    def whole_bytes(self) -> int:
        """The bytes of whole logits and their log-probabilities, which are alive together."""
        return 2 * self.elements * _value(self.loss.args[0]).dtype.itemsize


_CROSS_ENTROPY = aten.cross_entropy_loss.default
_LOSSES = frozenset({_CROSS_ENTROPY, aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default})
_LOG_SOFTMAX = aten.log_softmax.int
_ASSERTION = aten._assert_tensor_metadata.default
_CASTS = frozenset({aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default})
_COPIES = frozenset({aten.contiguous.default, aten.clone.default, aten.alias.default})
_RESHAPES = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default})
# Operators whose first argument after the tensor is a dim, which must not be that of the classes.
_BY_DIM = frozenset({aten.slice.Tensor, aten.select.int, aten.index_select.default})
_SCALES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})


def _match(loss: fx.Node) -> _Match | None:
    """Return the loss with the layer whose logits it takes; None if there is none, or others read the logits."""
    path: list[fx.Node] = []
    reader, node = loss, loss.args[0]
    penalties: list[fx.Node] = []
    while isinstance(node, fx.Node):
        others = [user for user in node.users if user is not reader and user.target is not _ASSERTION]
        if others:
            # A penalty of logsumexp (z-loss) reads the same logits, and no log-probabilities.
            if path or loss.target is not _CROSS_ENTROPY or any(not _is_logsumexp(other, node) for other in others):
                return None
            penalties = others
        if _is_layer(node):
            match = _Match(loss, node, path[::-1], penalties=penalties)
            return match if _may_move(match) and _follow(match) else None
        if node.target not in _STEPS:
            return None
        path.append(node)
        reader, node = node, node.args[0]
    return None


def _is_logsumexp(node: fx.Node, logits: fx.Node) -> bool:
    """Return True for `logsumexp` of the logits over the classes, where these are the last dim."""
    rank = _value(logits).dim()
    dims = argument_of(node, "dim") if node.target is aten.logsumexp.default else None
    return dims is not None and rank <= 2 and [dim % rank for dim in dims] == [rank - 1]


def _may_move(match: _Match) -> bool:
    """Return True if the loss's operands exist where the logits are first read, and no operand is changed before."""
    if any(match.first < source for source in match.loss.all_input_nodes):
        return False
    memory = {base_of(source) for source in (*match.layer.all_input_nodes, *match.loss.all_input_nodes)}
    node = match.layer
    while node is not match.loss:
        if not memory.isdisjoint(changed_memory(node)):
            return False
        node = node.next
    return True


def _is_layer(node: fx.Node) -> bool:
    """Return True for a product whose right factor is a matrix."""
    if node.target is aten.linear.default:
        return True
    return node.target in (aten.matmul.default, aten.mm.default) and _value(node.args[1]).dim() == 2


def _follow(match: _Match) -> bool:
    """Split the path of a match into moves, scale and cap; return False if it is no loss of the layer's logits."""
    classes = _value(match.layer).dim() - 1  # the dim of the classes so far
    normalizes = match.loss.target is _CROSS_ENTROPY
    is_normalized = False
    for node in match.path:
        source = _value(node.args[0])
        after = _STEPS[node.target](match, node, source, classes)
        if after is None:
            return False
        if node.target is _LOG_SOFTMAX:
            is_normalized = True
        elif is_normalized and node.target in (*_SCALES, aten.tanh.default):
            return False
        classes = after
    logits = _value(match.loss.args[0])
    # The classes of a loss are dim 1, or dim 0 of a single sample, which is small.
    return is_normalized != normalizes and logits.dim() > 1 and classes == 1


def _keep(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    """Follow a cast to any floating dtype, since statistics of logits are wide anyway."""
    return classes if _value(node).is_floating_point() else None


def _copy(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    return classes


def _normalize(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    return classes if argument_of(node, "dim") % source.dim() == classes else None


def _rescale(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    number = node.args[1]
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not number:
        return None
    factor = number if "mul" in str(node.target) else 1 / number
    if match.cap:
        match.cap *= factor
    else:
        match.scale *= factor
    return classes


def _bound(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    if match.cap:
        return None
    match.cap = 1.0
    return classes


def _take(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    """Follow an operator that selects elements of one dim."""
    dim = argument_of(node, "dim", 0) % source.dim()
    match.moves.append(node)
    if dim == classes:
        return None
    return classes - (_value(node).dim() < source.dim() and dim < classes)


def _reshape(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    """Follow a view that keeps the classes as the last dim."""
    result = _value(node)
    if classes != source.dim() - 1 or not result.dim() or not _is_size(result.shape[-1], source.shape[-1]):
        return None
    match.moves.append(node)
    return result.dim() - 1


def _flatten(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    start, end = (argument_of(node, name, default) for name, default in (("start_dim", 0), ("end_dim", -1)))
    if end % source.dim() >= classes or start % source.dim() > end % source.dim():
        return None
    match.moves.append(node)
    return classes - (source.dim() - _value(node).dim())


def _transpose(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    first, second = (argument_of(node, name) % source.dim() for name in ("dim0", "dim1"))
    match.moves.append(node)
    return {first: second, second: first}.get(classes, classes)


def _permute(match: _Match, node: fx.Node, source: Tensor, classes: int) -> int | None:
    match.moves.append(node)
    return [dim % source.dim() for dim in argument_of(node, "dims")].index(classes)


# Operators between a layer and its loss: each function returns the dim of the classes after the node, given that before
# it; None if the loss is not one of the layer's rows.
_STEPS: Mapping[Any, Callable[[_Match, fx.Node, Tensor, int], int | None]] = {
    **dict.fromkeys(_CASTS, _keep),
    **dict.fromkeys(_COPIES, _copy),
    **dict.fromkeys(_SCALES, _rescale),
    **dict.fromkeys(_BY_DIM, _take),
    **dict.fromkeys(_RESHAPES, _reshape),
    _LOG_SOFTMAX: _normalize,
    aten.tanh.default: _bound,
    aten.flatten.using_ints: _flatten,
    aten.transpose.int: _transpose,
    aten.permute.default: _permute,
}


def _replace(match: _Match) -> None:
    """Replace a loss by a loss in pieces, and remove the logits."""
    loss = match.loss
    graph, layer = loss.graph, match.layer
    with graph.inserting_before(match.first):
        hidden, weight, *further = layer.args
        bias = further[0] if further else None
        if layer.target is not aten.linear.default:
            weight = _add(match, aten.t.default, (weight,))
        for move in match.moves:
            others: tuple[Any, ...] = move.args[1:]
            if move.target in _RESHAPES:
                # After rows were dropped, a view may not be possible.
                hidden = _add(match, aten.reshape.default, (hidden, [*others[0][:-1], _value(hidden).shape[-1]]))
            else:
                hidden = _add(match, move.target, (hidden, *others), move.kwargs)
        value = _value(hidden)
        if value.dim() > 2:
            # The dim of the layer's width, at the position of the classes, becomes the last.
            order = [0, *range(2, value.dim()), 1]
            hidden = _add(match, aten.permute.default, (hidden, order))
        target, class_weights = loss.args[1], argument_of(loss, "weight")
        expectation = {
            "ignore_index": argument_of(loss, "ignore_index", -100),
            "label_smoothing": argument_of(loss, "label_smoothing", 0.0),
        }
        options = {**expectation, "scale": match.scale, "cap": match.cap, "dtype": _value(layer).dtype}
        statistics = _add(match, statistics_of_logits, (hidden, weight, bias, target, class_weights), options)
        logsumexp, expected = (_add(match, getitem, (statistics, place)) for place in (0, 1))
    reduction = argument_of(loss, "reduction", 1)
    loss.args = (logsumexp, expected, target, class_weights, reduction, *expectation.values())
    loss.kwargs = {"classes": _value(weight).shape[0], "dtype": _value(loss).dtype}
    loss.target = cross_entropy_of_statistics
    for penalty in match.penalties:
        penalty.args = (logsumexp, argument_of(penalty, "keepdim", False))
        penalty.kwargs = {"dtype": _value(penalty).dtype}
        penalty.target = logsumexp_of_statistics
    for node in [*match.path[::-1], layer]:
        for user in list(node.users):  # assertions about the removed tensor
            graph.erase_node(user)
        graph.erase_node(node)


def _add(match: _Match, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> fx.Node:
    """Add a node with the source line of the loss, and its value on fake tensors."""
    node = match.loss.graph.call_function(target, args, dict(kwargs or {}))
    values = fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    with torch.no_grad():
        value = target(*values[0], **values[1])
    node.meta = {**match.loss.meta, "val": value}
    return node


def _value(node: Any) -> Tensor:
    value: Tensor = node.meta["val"]
    return value


def _is_integer(value: Tensor) -> bool:
    return not value.is_floating_point() and not value.is_complex()


def _hint(size: int | torch.SymInt) -> int:
    return symbolic_hint(size) if isinstance(size, torch.SymInt) else size


def _is_size(left: int | torch.SymInt, right: int | torch.SymInt) -> bool:
    """Return True if two sizes are equal in every call."""
    return isinstance(left, int) and isinstance(right, int) and left == right
