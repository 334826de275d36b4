"""Operators that torch would decompose for one device, or can not export, traced as what can be sharded instead."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autoshard.capture.attention_operator import attention, attention_with_dropout
from autoshard.capture.ctc_operator import ctc_loss
from autoshard.capture.device_arguments import without_devices
from autoshard.capture.fixed_size_bags import embedding_bag
from autoshard.capture.recurrent_cell_operators import gru_cell, lstm_cell
from autoshard.capture.recurrent_layers import gru, lstm, rnn_relu, rnn_tanh
from autoshard.capture.rms_norm import rms_norm
from autoshard.errors import CaptureError

aten = torch.ops.aten


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention` in code that is traced without having been exported."""
    cast = torch.is_autocast_enabled("cpu") and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype("cpu") if cast else query.dtype
    return attention(query, key, value, attn_mask, dropout_p, is_causal, **options, dtype=dtype)


def gaussian_nll_loss(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """`torch.nn.functional.gaussian_nll_loss`, which looks at the numbers in `var` to refuse negative ones.

    Here these count as `eps`, as all variances below it do.

    Raises:
        ValueError: `var` has another shape than `input`, and than `input` with the last dim left out or one dim of
            size one; or `reduction` is none of "none", "mean" and "sum".
    """
    if not isinstance(var, Tensor):
        return functional.gaussian_nll_loss(input, target, var, full=full, eps=eps, reduction=reduction)
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)
    differing = [mine for mine, theirs in zip(var.shape, input.shape, strict=False) if mine != theirs]
    if var.dim() != input.dim() or differing not in ([], [1]):
        raise ValueError(
            f"gaussian_nll_loss: var has shape {list(var.shape)}, input {list(input.shape)}: they must be equal, but "
            "that var may lack the last dim, or have size one in one dim."
        )
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f'gaussian_nll_loss: reduction={reduction!r} is none of "none", "mean" and "sum".')
    # A variance that is raised to eps keeps its gradient.
    var = var + (var.clamp(min=eps) - var).detach()
    loss = 0.5 * (var.log() + (input - target).square() / var)
    if full:
        loss = loss + 0.5 * math.log(2 * math.pi)
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


_CALLED_AS: dict[Any, Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    functional.ctc_loss: ctc_loss,
    functional.embedding_bag: embedding_bag,
    functional.gaussian_nll_loss: gaussian_nll_loss,
}


_LAYERS_CALLED_AS: dict[Any, Callable[..., Any]] = {
    torch.lstm: lstm,
    torch.gru: gru,
    torch.rnn_tanh: rnn_tanh,
    torch.rnn_relu: rnn_relu,
}


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether a recurrent layer is called on a batch: input, states, weights, and whether there are biases.

    Called on packed sequences, it takes the sizes of their steps besides.
    """
    return len(args) == 9 and isinstance(args[3], bool)


class Exportable(TorchFunctionMode):
    """While active, losses and bags are computed by the functions of this room, as `torch.export` needs it.

    All tensors are made on the device of the capture.

    So are recurrent layers, every time step of which torch would run without numbers. Under autocast they are left to
    it, as it alone says of which element type their results are, and replaced in the exported graph.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise CaptureError(
                "torch.nn.utils.rnn.pack_padded_sequence makes a tensor whose size depends on the numbers in lengths, "
                "and no plan can be made for such a size. Give the recurrent layer the padded batch, and leave out "
                "what lies behind the end of each sequence with a mask (its last state is the output at lengths - 1)."
            )
        func, args, kwargs = without_devices(func, args, kwargs or {})
        layer = _LAYERS_CALLED_AS.get(func)
        if layer is not None and _is_plain(args) and not torch.is_autocast_enabled(args[0].device.type):
            return layer(*args, dtype=args[0].dtype)
        return _CALLED_AS.get(func, func)(*args, **kwargs)


_TRACED_AS: dict[Any, Callable[..., Any]] = {
    aten.rms_norm.default: rms_norm,
    aten.lstm_cell.default: lstm_cell,
    aten.gru_cell.default: gru_cell,
    aten.lstm.input: lstm,
    aten.gru.input: gru,
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
}
"""Functions by the operator that they stand for; they are told the element type that `torch.export` noted."""


def replace_composites(module: fx.GraphModule) -> None:
    """Let recurrent layers and cells, attention and root-mean-square norms be traced as the functions of this room.

    Regions under autocast or without gradients are modules of their own inside of the exported one.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _replace(part.graph)


def _replace(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        node.target = attention_with_dropout if dropout else attention
        node.kwargs = {**node.kwargs, "dtype": node.meta["val"].dtype}
    for target, function in _TRACED_AS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = function
            value = node.meta["val"]
            node.kwargs = {**node.kwargs, "dtype": (value if isinstance(value, Tensor) else value[0]).dtype}
