"""The private torch names that this room uses, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage

# Runs a list of actions, messages among them, on the stages of a rank.
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime

__all__ = ["ActionsRuntime"]


class ActionsRuntime(_PipelineScheduleRuntime):
    """Torch's runtime of lists of actions, on microbatches that are there already.

    Args:
        stages: of this rank.
        placement: the rank of every stage.
        rows: for every rank its actions as torch writes them, messages among them.
        microbatches: of one step.
        loss: from what the last stage returns for a microbatch, and the part that this is of the batch (a tensor
            without dims), to what is differentiated.
    """

    def __init__(
        self,
        stages: Sequence[PipelineStage],
        placement: Sequence[int],
        rows: Sequence[Sequence[str]],
        microbatches: int,
        loss: Callable[[Any, torch.Tensor], torch.Tensor] | None,
    ) -> None:
        loss_fn = None if loss is None else lambda output, part: loss(output, part.squeeze())
        super().__init__(list(stages), microbatches, loss_fn=loss_fn, scale_grads=False)
        # Torch's own way to here refuses orders without backward.
        self.pipeline_order_with_comms = {
            rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)
        }
        self.stage_index_to_group_rank = dict(enumerate(placement))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _split_inputs(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[list[Any], list[Any]]:
        """Positional and keyword arguments of every microbatch: `step` is given the latter, one by one."""
        return [()] * len(args), list(args)

    def run(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], parts: torch.Tensor, backward: bool
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """One step.

        Args:
            microbatches: keyword arguments of every microbatch; each stage is called with all.
            parts: what part every microbatch is of the batch; a vector.
            backward: whether the actions run backward; otherwise outputs are kept.

        Returns:
            On the rank of the last stage the loss of every microbatch, and what it returned for each if that is kept.
        """
        losses: list[torch.Tensor] | None = None if self._loss_fn is None else []
        targets = None if self._loss_fn is None else parts
        step = self.step if backward else self.eval
        outputs = step(*microbatches, target=targets, losses=losses, return_outputs=not backward)
        return losses or [], outputs or []

    def _merge_outputs(self, output_chunks: list[Any]) -> list[Any]:
        return list(output_chunks)
