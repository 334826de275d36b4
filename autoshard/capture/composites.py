"""Operators that torch would decompose for one device, or can not export, traced as what can be sharded instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from autoshard.capture.bags import embedding_bag
from autoshard.capture.ctc import ctc_loss
from autoshard.capture.recurrent import gru, lstm, rnn_relu, rnn_tanh
from autoshard.errors import CaptureError

aten = torch.ops.aten


def attention_with_dropout(*args: Any, **kwargs: Any) -> Tensor:
    """`aten.scaled_dot_product_attention` as matrix products, softmax and dropout.

    Fused kernels keep one random state for all samples and heads, so that no shard could draw its part again.
    """
    result: Tensor = aten._scaled_dot_product_attention_math.default(*args, **kwargs)[0]
    return result


_CALLED_AS: dict[Any, Callable[..., Any]] = {
    torch.ctc_loss: ctc_loss,
    functional.ctc_loss: ctc_loss,
    functional.embedding_bag: embedding_bag,
}


class Exportable(TorchFunctionMode):
    """While active, losses and bags are computed by the functions of this room, as `torch.export` needs it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") == "_pack_padded_sequence":
            raise CaptureError(
                "torch.nn.utils.rnn.pack_padded_sequence makes a tensor whose size depends on the numbers in lengths, "
                "and no plan can be made for such a size. Give the recurrent layer the padded batch, and leave out "
                "what lies behind the end of each sequence with a mask (its last state is the output at lengths - 1)."
            )
        return _CALLED_AS.get(func, func)(*args, **(kwargs or {}))


_LAYERS: dict[Any, Callable[..., Any]] = {
    aten.lstm.input: lstm,
    aten.gru.input: gru,
    aten.rnn_tanh.input: rnn_tanh,
    aten.rnn_relu.input: rnn_relu,
}


def replace_composites(module: fx.GraphModule) -> None:
    """Let recurrent layers, and attention with dropout, be traced as the functions of this room.

    Regions under autocast or without gradients are modules of their own inside of the exported one.
    """
    for part in module.modules():
        if isinstance(part, fx.GraphModule):
            _replace(part.graph)
            part.recompile()


def _replace(graph: fx.Graph) -> None:
    for node in graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default):
        dropout = node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0)
        if dropout:
            node.target = attention_with_dropout
    for target, function in _LAYERS.items():
        for node in graph.find_nodes(op="call_function", target=target):
            node.target = function
            node.kwargs = {**node.kwargs, "dtype": node.meta["val"][0].dtype}
