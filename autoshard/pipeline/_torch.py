"""The private torch names that this room uses, in one place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

# Runs a list of actions, messages among them, on the stages of a rank.
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

try:
    from torch.distributed.pipelining._utils import InferenceMode  # whether sizes are known before a step (2.13)
except ImportError:
    InferenceMode = None  # type: ignore[assignment, misc]

__all__ = ["ActionsRuntime", "MultiPeerStage", "order"]


class MultiPeerStage(PipelineStage):
    """Torch's stage, which may send what it makes to several processes of the stage before or behind, or to none.

    Args:
        args, kwargs: of torch's stage, whose group holds those that this process receives from.
        line: the group for messages, in which all are.
        sends: to whom, in global ranks, messages to the stage before (-1) and behind (1) go; as in torch where it is
            empty.
    """

    def __init__(self, *args: Any, line: dist.ProcessGroup, sends: Mapping[int, Sequence[int]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._axis_group = line
        self._sends = sends

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._route_messages(super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._route_messages(super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._route_messages(super().get_fwd_send_ops(fwd_chunk_id), self._sends.get(1))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._route_messages(super().get_bwd_send_ops(bwd_chunk_id), self._sends.get(-1))

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Messages before the first step, in which torch takes neighbours for pairs; up to torch 2.12."""
        return [] if self._sends else super()._get_init_p2p_neighbors_ops()  # type: ignore[no-any-return]

    @property
    def is_paired(self) -> bool:
        """Whether every process sends to the one that it receives from."""
        return not self._sends

    def _route_messages(self, ops: list[dist.P2POp], peers: Sequence[int] | None = None) -> list[dist.P2POp]:
        """The messages in the group of all, to `peers`, or else to whom torch has them go."""
        if not self._sends:
            return ops
        return [
            dist.P2POp(one.op, one.tensor, peer, self._axis_group)
            for one in ops
            for peer in ((one.peer,) if peers is None else peers)
        ]


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

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        """Make communicators of neighbours by torch's vote on whether all sizes are known, from torch 2.13 on.

        They are, so the host need not wait for the device to tell it. The vote takes neighbours for pairs.
        """
        if all(stage.is_paired for stage in stages):
            vote: torch.Tensor | None = None
            for stage in stages:
                vote = stage._warmup_forward_vote(has_backward, vote)
            for stage in reversed(stages):
                vote = stage._warmup_backward_result(vote)
        for stage in stages:
            stage._inference_mode = InferenceMode.STATIC

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


@dataclass
class _ScheduleStage:
    """What torch's schedules ask of a stage to put actions in order; nothing runs, and no process group is needed."""

    group_size: int
    num_stages: int
    group_rank: int = 0
    submod: Any = None
    stage_index_to_group_rank: Mapping[int, int] | None = None


class _WithoutMessages:
    """A schedule of torch that is not made ready to run: adding its messages takes longer than all else."""

    def _prepare_schedule_with_comms(self, actions: object, format: str = "compute_only") -> None:
        pass


def order(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    """The computations of every rank, in the order of a schedule class of torch.

    Args:
        name: of a class that has several stages per rank, as `get_schedule_class` knows it.
        ranks: of the pipeline.
        virtual: stages per rank.
        microbatches: of one step.

    Returns:
        For every rank its actions as torch writes them, such as `"2F0"`; idle places are left out.
    """
    schedule_class: Any = type(name, (_WithoutMessages, get_schedule_class(name)), {})
    made = schedule_class([_ScheduleStage(ranks, ranks * virtual) for _ in range(virtual)], microbatches)
    return [[str(action) for action in made.pipeline_order[rank] if action is not None] for rank in range(ranks)]
