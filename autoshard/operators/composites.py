"""Operators that torch decomposes for one device, or cannot export, traced as functions that can be sharded."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from autoshard.capture.capture_errors import node_place
from autoshard.capture.nodes import argument_of, base_of
from autoshard.operators._torch import symbolic_hint
from autoshard.operators.attention.attention_operator import attention, attention_with_dropout
from autoshard.operators.bags import embedding_bag
from autoshard.operators.ctc import ctc_loss
from autoshard.operators.norms import rms_norm
from autoshard.operators.recurrent.recurrence import gru, lstm, rnn_relu, rnn_tanh
from autoshard.operators.recurrent.time_loops import gru_cell, lstm_cell

aten = torch.ops.aten


def attend(query: Tensor, *operands: Any, **options: Any) -> Tensor:
    """Return `torch.nn.functional.scaled_dot_product_attention` in code that is traced without export."""
    # Exported nodes record the dtype of their result; here autocast determines it.
    cast = torch.is_autocast_enabled("cpu") and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if cast else query.dtype
    return attention(query, *operands, **options, dtype=dtype)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Return `torch.nn.functional.gaussian_nll_loss`, without its check of `var` for negative numbers.

    Negative variances count as `eps`, as all variances below it do.

    Raises:
        ValueError: `var` has neither the shape of `input`, nor that shape without the last dim or with one dim of size
            1; or `reduction` is not "none", "mean" or "sum".
    """
    if not isinstance(var, Tensor):
        return functional.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    differing = [size for size, expected in zip(var.shape, input.shape, strict=False) if size != expected]
    if var.dim() != input.dim() or differing not in ([], [1]):
        raise ValueError(
            f"gaussian_nll_loss: var has shape {list(var.shape)}, input {list(input.shape)}: they must be equal, but "
            "that var may lack the last dim, or have size one in one dim."
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'gaussian_nll_loss: reduction={reduction!r} is none of "none", "mean" and "sum".')
    # As in torch, a variance that is raised to eps keeps its gradient, which `clamp` would drop.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


_Layer = Callable[..., Any]


def _layer_on_batches(torchs: Callable[..., Any], layer: _Layer) -> _Layer:
    """Return a function that runs our recurrent layer on a batch, and torch's otherwise."""

    def call(*args: Any, **kwargs: Any) -> Any:
        # On a batch, a layer takes input, states, weights, and a bool for biases; on packed sequences, it also takes
        # the sizes of their steps. torch would run every time step of a layer on fake tensors. Under autocast it has
        # to: only the exported node tells the dtype of the result, and it is replaced later.
        is_batch = len(args) == 9 and isinstance(args[3], bool)
        if is_batch and not torch.is_autocast_enabled(args[0].device.type):
            return layer(*args, dtype=args[0].dtype)
        return torchs(*args, **kwargs)

    return call


_LAYERS: dict[Any, _Layer] = {
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
}

CALLED_AS: dict[Any, Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    functional.ctc_loss: ctc_loss,
    functional.embedding_bag: embedding_bag,
    functional.gaussian_nll_loss: gaussian_nll_loss,
    **{torchs: _layer_on_batches(torchs, layer) for torchs, layer in _LAYERS.items()},
}
"""torch's function -> its replacement while code is exported."""

# Operator -> the function that replaces it, which takes the dtype of the result that `torch.export` recorded.
_TRACED_AS: dict[Any, Callable[..., Any]] = {
    aten.rms_norm.default: rms_norm,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.lstm.input: lstm,
    aten.gru.input: gru,
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
}


def replace_composites(graph: fx.Graph) -> None:
    """Replace recurrent layers and cells, attention and root-mean-square norms by functions that are traced."""
    stride_readers = [node for op in _STRIDE_READERS for node in graph.find_nodes(op="call_function", target=op)]
    read = set(map(base_of, stride_readers))
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        node.target = attention_with_dropout if argument_of(node, "dropout_p", 0.0) else attention
        # The memory order costs a copy where kernels return another one.
        order = {"order": _memory_order(node.meta["val"])} if node in read else {}
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype, **order}
    _make_gradients_dense(graph)
    for target, function in _TRACED_AS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = function
            value = node.meta["val"]
            node.kwargs = {**node.kwargs, "dtype": (value if isinstance(value, Tensor) else value[0]).dtype}


# Operators that fail, or give other results, if a tensor has other strides than those recorded by torch.export.
_STRIDE_READERS = (aten.view.default, aten.as_strided.default)


def _memory_order(value: Tensor) -> tuple[int, ...]:
    """Return the dims of a tensor larger than 1, in memory order, outermost first."""
    sizes, strides = (list(map(_in_example, numbers)) for numbers in (value.shape, value.stride()))
    return tuple(sorted((dim for dim, size in enumerate(sizes) if size > 1), key=lambda dim: -strides[dim]))


def _in_example(size: int | torch.SymInt) -> int:
    return symbolic_hint(size) if isinstance(size, torch.SymInt) else size


# The flag of sparse gradients, by the operators that have one.
_SPARSE_FLAGS = {
    aten.embedding.default: "sparse",
    aten.embedding_bag.default: "sparse",
    aten.embedding_bag.padding_idx: "sparse",
    aten.gather.default: "sparse_grad",
}


def _make_gradients_dense(graph: fx.Graph) -> None:
    """Make operators compute dense gradients in place of sparse ones, with one warning."""
    sparse = [node for target in _SPARSE_FLAGS for node in graph.find_nodes(op="call_function", target=target)]
    sparse = [node for node in sparse if argument_of(node, _SPARSE_FLAGS[node.target], False)]
    for node in sparse:
        flag = _SPARSE_FLAGS[node.target]
        position = [argument.name for argument in node.target._schema.arguments].index(flag)
        node.args = node.args[:position] + (False,) * (len(node.args) > position) + node.args[position + 1 :]
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != flag}
    if sparse:
        flag = _SPARSE_FLAGS[sparse[0].target]
        warnings.warn(
            f"{node_place(sparse[0], f'asks for a sparse gradient ({flag}=True)')}: gradients of sharded parameters "
            "are dense, of the same numbers. Leave the flag out, and take torch.optim.Adam in place of SparseAdam, "
            "which takes sparse gradients alone.",
            stacklevel=2,
        )
