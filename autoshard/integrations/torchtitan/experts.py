"""Mixtures of experts of torchtitan, rewritten so that capture sees the routes of rows, on any device."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torchtitan.models.common.moe import RoutedExperts, TokenChoiceTopKRouter
from torchtitan.models.common.token_dispatcher import (
    AllToAllTokenDispatcher,
    LocalDispatchMetadata,
    LocalTokenDispatcher,
)

from autoshard.errors import PlanError


class RoutedRowsDispatcher(LocalTokenDispatcher):
    """Sorts the rows of tokens by expert and puts them back by the inverse order.

    torchtitan adds rows to tokens by `scatter_add`, and counts the rows of experts in a table of tokens and experts. To
    a rule, these are only indices and numbers. In this form, `operators/routed/routing.py` sees that rows go to groups
    and return, so a plan may send them to the ranks of their experts. Rows are weighted, and those of one token summed,
    in float32.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(LocalTokenDispatcher.Config):
        """The fields of torchtitan's own dispatcher."""

    def dispatch(
        self, tokens: Tensor, scores: Tensor, experts: Tensor, counts: Tensor
    ) -> tuple[Tensor, Tensor, LocalDispatchMetadata]:
        """Return the rows of tokens sorted by expert, the number of rows of each expert, and what `combine` needs.

        Args:
            tokens: `[T, D]`.
            scores, experts: the weights and the numbers of the experts of each token, `[T, K]`.
            counts: not used; `histc` counts the experts' rows again.
        """
        ids = experts.reshape(-1)
        order = torch.argsort(ids, stable=True)
        counts = torch.histc(ids.float(), self.num_experts, 0, self.num_experts - 1)
        metadata = LocalDispatchMetadata(
            token_indices_experts_sorted_N=order, topk_scores_experts_sorted_N=scores.reshape(-1)[order]
        )
        return tokens[order // self.top_k], counts, metadata

    def combine(self, rows: Tensor, metadata: LocalDispatchMetadata, tokens: Tensor) -> Tensor:
        """Return for every token the weighted sum of its rows, `[T, D]`."""
        weighted = rows.float() * metadata.topk_scores_experts_sorted_N.unsqueeze(-1)
        back = torch.argsort(metadata.token_indices_experts_sorted_N)
        return weighted[back].view(tokens.shape[0], self.top_k, -1).sum(1).to(tokens.dtype)


def prepare_experts(model: nn.Module) -> None:
    """Replace the dispatchers of a model by `RoutedRowsDispatcher`, and let its routers compute scores in float32.

    Raises:
        PlanError: a dispatcher exchanges rows over its own process groups.
    """
    for name, part in model.named_modules():
        if isinstance(part, RoutedExperts):
            dispatcher = part.token_dispatcher
            if type(dispatcher) not in (LocalTokenDispatcher, AllToAllTokenDispatcher):
                raise PlanError(
                    f"{name}: {type(dispatcher).__name__} exchanges rows of experts itself, which a plan does: set "
                    "expert_parallel_degree to 1 and moe_comm_backend to 'standard'."
                )
            config = RoutedRowsDispatcher.Config(num_experts=dispatcher.num_experts, top_k=dispatcher.top_k)
            part.token_dispatcher = config.build()
        if isinstance(part, TokenChoiceTopKRouter):
            # The router requests this by an autocast to float32, which GPUs support, but CPUs, on whose tensors a step
            # is captured, do not.
            part.gate.forward = functools.partial(_linear_in_float32, part.gate)


def _linear_in_float32(gate: nn.Linear, x: Tensor) -> Tensor:
    bias = None if gate.bias is None else gate.bias.float()
    return functional.linear(x.float(), gate.weight.float(), bias)
