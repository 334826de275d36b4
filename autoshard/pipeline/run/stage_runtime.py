"""Steps of the stages of one rank, by torch's pipeline stages and its runtime of lists of actions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from autoshard.errors import AutoshardError, PipelineError
from autoshard.pipeline._torch import ActionsRuntime, MultiPeerStage
from autoshard.pipeline.graph.stage_modules import StageModule
from autoshard.pipeline.plan.boundaries import Tensors
from autoshard.pipeline.run.loss_counts import Count, loss_shares
from autoshard.pipeline.run.position import PipelinePosition
from autoshard.pipeline.schedule.actions import Action, ActionKind, Schedule
from autoshard.pipeline.schedule.schedule_messages import runtime_actions
from autoshard.runtime.gradient_sums import GradientSums

_FORWARD = (ActionKind.FORWARD, ActionKind.SEND_FORWARD, ActionKind.RECEIVE_FORWARD)

Inputs = Mapping[str, torch.Tensor]
"""The inputs of one microbatch by their names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The output that is differentiated.

    Attributes:
        place: the position among the outputs.
        dtype: its dtype.
        count: the number of targets that count in a microbatch, where the loss is a mean over targets; else None.
    """

    place: int
    dtype: torch.dtype
    count: Count | None = None

    def share(self, outputs: Sequence[torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch times its `part` of the batch."""
        value = outputs[self.place]
        # The mean over no targets is NaN; such a microbatch adds nothing to the batch's mean.
        return torch.where(part == 0, value.new_zeros(()), value * part)


class StageCall(nn.Module):
    """A stage as torch's runtime calls it: with received tensors, and with all inputs of the model by their names."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.module = stage.module
        self.keywords = {keyword: name for name, (keyword, _) in stage.inputs.items()}

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        keywords = {keyword: inputs[name] for keyword, name in self.keywords.items()}
        results = self.module(*received, **keywords)
        return tuple(result.contiguous() for result in results)  # messages have to be contiguous


class PipelineRuntime:
    """Runs steps of the stages of this rank.

    Torch's runtime runs a list of actions, so that every rank has the order of the schedule, messages included, whether
    the schedule is one of torch's or not.

    Args:
        stages: of this rank, with the tensors that each receives and returns here, on the meta device.
        schedule: the orders of all ranks.
        position: of this process in the pipeline.
        device: of the stages.
        loss: the output of the model that is differentiated; None where there is none.

    Attributes:
        second_halves: if the schedule splits backward, the list of every stage to which its backwards append what they
            leave for the second half. (Torch splits backward by walking the autograd graph of a stage. That of a
            parallelised stage is one operation, which torch would run twice, once for each half.)
        gradient_sums: of every stage, the gradients that its last backward reduces once per step; empty with a single
            microbatch. The reductions are awaited at the end of the step: other stages of the rank compute meanwhile.

    Raises:
        PipelineError: ranks of the schedule wait for one another, or its last stage takes microbatches out of order.
    """

    def __init__(
        self,
        stages: Sequence[tuple[StageModule, tuple[Tensors, Tensors]]],
        schedule: Schedule,
        position: PipelinePosition,
        device: torch.device,
        loss: Loss | None,
    ) -> None:
        self.schedule = schedule
        self.loss = loss
        self._calls = [(stage.index, StageCall(stage), messages) for stage, messages in stages]
        self._position = position
        self._group = position.group
        self._device = device
        self._orders = runtime_actions(schedule)
        self.second_halves: dict[int, list[Callable[[], None]]] = (
            {stage.index: [] for stage, _ in stages} if schedule.splits_backward else {}
        )
        number = schedule.microbatches
        self.gradient_sums = {stage.index: GradientSums(number) for stage, _ in stages} if number > 1 else {}
        self._training: ActionsRuntime | None = None
        self._evaluating: ActionsRuntime | None = None
        _check_microbatch_order(schedule)

    def train(self, microbatches: Sequence[Inputs]) -> torch.Tensor:
        """Run forward and backward of all microbatches; gradients of the batch's loss are added to `.grad`.

        Args:
            microbatches: inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank of the group.

        Raises:
            PipelineError: the step failed, for example because another rank died; no step can follow.
        """
        assert self.loss is not None, "there is no loss to differentiate"
        if self._training is None:
            self._training = self._build_runtime(self._orders)
        losses, _ = self._step(self._training, microbatches, backward=True)
        return self._sum_from_last_stage(self.loss, losses)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Inputs]) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, ...]]]:
        """Run forward of all microbatches.

        Args:
            microbatches: inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank, or None where the model has no loss; and on the rank of the last stage
            the outputs for each microbatch.
        """
        if self._evaluating is None:
            parts = [[part for action in order for part in action.computations] for order in self._orders]
            self._evaluating = self._build_runtime(
                [[part for part in order if part.kind in _FORWARD] for order in parts]
            )
        losses, outputs = self._step(self._evaluating, microbatches, backward=False)
        return (None if self.loss is None else self._sum_from_last_stage(self.loss, losses)), outputs

    def _step(
        self, runtime: ActionsRuntime, microbatches: Sequence[Inputs], backward: bool
    ) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, ...]]]:
        """Run one step."""
        # Ranks that wait for a dead one fail with closed connections, so the error explains that.
        try:
            for sums in self.gradient_sums.values():
                sums.clear()
            results = runtime.run(microbatches, self._microbatch_parts(microbatches), backward)
            for sums in self.gradient_sums.values():
                sums.run_deferred()
            return results
        except RuntimeError as error:
            cause = _first_cause(error)
            if isinstance(cause, AutoshardError):
                raise cause from error
            raise PipelineError(
                f"a step of the pipeline broke off on rank {dist.get_rank()} (rank {dist.get_rank(self._group)} of "
                f"{self.schedule.ranks} along the pipeline): {type(cause).__name__}: {cause}\nIf a connection was "
                f"closed or timed out, another rank ended or hangs, and its own log says why. The ranks are no longer "
                f"at the same point: start all anew, from the last checkpoint."
            ) from error

    def _build_runtime(self, orders: Sequence[Sequence[Action]]) -> ActionsRuntime:
        """Return torch's runtime of some orders; its stages have buffers of their own for received tensors."""
        stages = [
            MultiPeerStage(
                call,
                index,
                self.schedule.stages,
                self._device,
                input_args=received,
                output_args=returned,
                group=self._group,
                dw_builder=partial(_pop_second_half, self.second_halves[index])
                if index in self.second_halves
                else None,
                line=self._position.axis_group,
                sends=self._position.sends,
            )
            for index, call, (received, returned) in self._calls
        ]
        texts = [[str(action) for action in order] for order in orders]
        loss = None if self.loss is None else self.loss.share
        return ActionsRuntime(stages, self.schedule.placement, texts, self.schedule.microbatches, loss)

    def _microbatch_parts(self, microbatches: Sequence[Inputs]) -> torch.Tensor:
        """Return the share of every microbatch in the loss of the batch; exact on the rank of the last stage."""
        last = self.schedule.placement[-1] == dist.get_rank(self._group)
        return loss_shares(self.loss.count if last and self.loss is not None else None, microbatches)

    def _sum_from_last_stage(self, loss: Loss, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return on every rank the sum of the loss shares that the rank of the last stage has."""
        total = torch.zeros((), dtype=loss.dtype, device=self._device)
        for share in shares:
            total += share.detach()
        source = self._position.starts[self.schedule.placement[-1]]
        dist.broadcast(total, group=self._position.axis_group, group_src=source)
        return total


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _pop_second_half(later: list[Callable[[], None]]) -> Callable[[], None]:
    """Return the second half of the backward that has just run; it does nothing if there is none."""
    return later.pop() if later else lambda: None


def _check_microbatch_order(schedule: Schedule) -> None:
    """Raise `PipelineError` for an order in which torch would confuse the losses of microbatches."""
    last = schedule.stages - 1
    parts = [part for action in schedule.orders[schedule.placement[last]] for part in action.computations]
    turns = [part.microbatch for part in parts if part.stage == last and part.kind == ActionKind.FORWARD]
    if turns != list(range(schedule.microbatches)):
        raise PipelineError(
            f"schedule {schedule.name} runs the last stage forward for microbatches {turns}: torch's runtime needs "
            f"them in their order there."
        )
