"""The private torch names that this room uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict as checkpoint_state
from torch.distributed.pipelining import PipelineStage

# The runtime of lists of actions, messages included, on the stages of a rank.
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime, get_schedule_class

from autoshard.errors import PipelineError

try:
    from torch.distributed.pipelining._utils import InferenceMode  # STATIC: sizes are known before a step (torch 2.12)
except ImportError:
    InferenceMode = None  # type: ignore[assignment, misc]

__all__ = ["SENDS_ALL_GRADIENTS", "ActionsRuntime", "MultiPeerStage", "check_messages", "make_group", "order"]

SENDS_ALL_GRADIENTS = not hasattr(PipelineStage, "_get_grad_send_meta")
"""True if this release of torch sends a gradient back for every tensor that a stage receives, as 2.11 and 2.12 do."""


class MultiPeerStage(PipelineStage):
    """Torch's stage, whose messages may go to several processes of the neighbouring stages, or to none.

    Args:
        args, kwargs: of torch's stage; its group holds the processes that this one receives from.
        line: the group of all messages, with all processes of the pipeline.
        sends: global ranks that receive the messages to the stage before (-1) and behind (1). If it is empty, messages
            go to torch's neighbours.
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
        # Torch up to 2.12 exchanges messages before the first step, in pairs of neighbours. Neighbours on one rank need
        # none, and gloo has none from a rank to itself.
        pairs = [] if self._sends else super()._get_init_p2p_neighbors_ops()
        return [op for op in pairs if op.group_peer != self.group_rank]

    @property
    def is_paired(self) -> bool:
        """True if every process sends to the one that it receives from."""
        return not self._sends

    def _route_messages(self, ops: list[dist.P2POp], peers: Sequence[int] | None = None) -> list[dist.P2POp]:
        """Return the messages in the group of all, to `peers`, or else to torch's receivers."""
        if not self._sends:
            return ops
        return [
            dist.P2POp(op.op, op.tensor, peer, self._axis_group)
            for op in ops
            for peer in ((op.peer,) if peers is None else peers)
        ]


class ActionsRuntime(_PipelineScheduleRuntime):
    """Torch's runtime of lists of actions, for a batch that is split into microbatches already.

    Args:
        stages: of this rank.
        placement: the rank of every stage.
        rows: the actions of every rank in torch's notation, messages included.
        microbatches: of one step.
        loss: maps the output of the last stage for a microbatch, and the microbatch's part of the batch (a tensor
            without dims), to the value that is differentiated.
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
        # Set here, because torch's methods that set it refuse orders without backward.
        self.pipeline_order_with_comms = {
            rank: [_Action.from_str(action) for action in row] for rank, row in enumerate(rows)
        }
        self.stage_index_to_group_rank = dict(enumerate(placement))
        for stage in stages:
            stage.stage_index_to_group_rank = self.stage_index_to_group_rank

    def _warmup_p2p(self, stages: Any, has_backward: bool, p2p_done: bool) -> None:
        # From torch 2.13 on, neighbours vote on whether all sizes are known, which also makes their communicators. The
        # vote assumes pairs. All sizes are known, so the result is set without waiting for the device.
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
        # `run` passes the keyword arguments of each microbatch as one positional argument of `step`.
        return [()] * len(args), list(args)

    def run(
        self, microbatches: Sequence[Mapping[str, torch.Tensor]], parts: torch.Tensor, backward: bool
    ) -> tuple[list[torch.Tensor], list[Any]]:
        """Run one step.

        Args:
            microbatches: keyword arguments of every microbatch; each stage is called with all.
            parts: the part of the batch in every microbatch; a vector.
            backward: True to run backward; otherwise outputs are kept.

        Returns:
            On the rank of the last stage the loss of every microbatch, and its outputs if they are kept.
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
    """The attributes of a stage that torch's schedules read to order actions; needs no process group."""

    group_size: int
    num_stages: int
    group_rank: int = 0
    submod: Any = None
    stage_index_to_group_rank: Mapping[int, int] | None = None


class _WithoutMessages:
    """Mixin that leaves the messages out: torch takes longer to add them than for all else."""

    def _prepare_schedule_with_comms(self, actions: object, format: str = "compute_only") -> None:
        pass


def order(name: str, ranks: int, virtual: int, microbatches: int) -> list[list[str]]:
    """Return the computations of every rank, in the order of a schedule class of torch.

    Args:
        name: of a class with several stages per rank, as `get_schedule_class` knows it.
        ranks: of the pipeline.
        virtual: stages per rank.
        microbatches: of one step.

    Returns:
        The actions of every rank in torch's notation, such as `"2F0"`, without the idle places.
    """
    schedule_class: Any = type(name, (_WithoutMessages, get_schedule_class(name)), {})
    schedule = schedule_class([_ScheduleStage(ranks, ranks * virtual) for _ in range(virtual)], microbatches)
    return [[str(action) for action in schedule.pipeline_order[rank] if action is not None] for rank in range(ranks)]


def make_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Return a new group of these global ranks, in this order; they alone call this.

    Raises:
        PipelineError: the ranks are not in ascending order, which torch 2.11 brings them into.
    """
    if list(ranks) == sorted(ranks):
        return dist.new_group(list(ranks), use_local_synchronization=True)
    if "sort_ranks" not in inspect.signature(dist.new_group).parameters:
        raise PipelineError(
            f"torch {torch.__version__} has no group of the ranks {list(ranks)} in this order. Make a mesh whose "
            "processes follow one another along the pipeline in ascending order, or install torch 2.12 or later."
        )
    return dist.new_group(list(ranks), use_local_synchronization=True, sort_ranks=False)


def check_messages(received: Sequence[torch.Tensor]) -> None:
    """Raise a `PipelineError` if this release of torch can't train a stage that receives such tensors.

    Torch 2.11 and 2.12 send a gradient back for every tensor that a stage receives.
    """
    constants = [str(tensor.dtype).removeprefix("torch.") for tensor in received if not tensor.requires_grad]
    if constants and SENDS_ALL_GRADIENTS:
        raise PipelineError(
            f"torch {torch.__version__} sends gradients of all that stages send one another, and a stage receives "
            f"{', '.join(constants)} without a gradient from the one before. Compute it in the stage that reads it, as "
            "from an input of the model, or install torch 2.13 or later."
        )


def names_optimizer_groups() -> bool:
    """Return True within a `get_optimizer_state_dict` that keeps groups, each with the names of its parameters."""
    # Torch passes the option to nobody, so it is read on the stack. For releases with other names this is False.
    save, load = (
        getattr(inspect.unwrap(getattr(checkpoint_state, name, None)), "__code__", None)  # type: ignore[arg-type]
        for name in ("_get_optim_state_dict", "_load_optim_state_dict")
    )
    frame, info = inspect.currentframe(), None
    while frame is not None:
        if frame.f_code is save:
            info = frame.f_locals.get("info")
        if frame.f_code is load:
            # A load of whole tensors asks for the state of this rank.
            return False
        frame = frame.f_back
    return info is not None and not getattr(info, "flatten_optimizer_state_dict", False)
