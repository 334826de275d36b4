"""Running the stages of one rank, by torch's pipeline stages and its runtime of lists of actions."""

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
"""The inputs of one microbatch, by their names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The output that is differentiated.

    Attributes:
        place: among the outputs.
        dtype: its dtype.
        count: how much counts in a microbatch, where the loss is a mean over what counts; else None.
    """

    place: int
    dtype: torch.dtype
    count: Count | None = None

    def share(self, outputs: Sequence[torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        """What one microbatch, which counts for a `part` of the batch, adds to the loss of the batch."""
        value = outputs[self.place]
        # The mean over nothing is no number, and nothing of the batch's mean either.
        return torch.where(part == 0, value.new_zeros(()), value * part)


class StageCall(nn.Module):
    """A stage as torch's runtime calls it: with what it receives, and with all inputs of the model by their names."""

    def __init__(self, stage: StageModule) -> None:
        super().__init__()
        self.module = stage.module
        self.keywords = {keyword: name for name, (keyword, _) in stage.inputs.items()}

    def forward(self, *received: torch.Tensor, **inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        own = {keyword: inputs[name] for keyword, name in self.keywords.items()}
        results = self.module(*received, **own)
        return tuple(result.contiguous() for result in results)  # as it has to be to be sent


class PipelineRuntime:
    """Steps of the stages of this rank.

    The order of every rank, messages included, is the schedule's own, for torch's schedules as for others: torch's
    runtime runs a list of actions.

    Args:
        stages: those of this rank, with what each receives and returns here, on the meta device.
        schedule: the orders of all ranks.
        station: this process's place in the pipeline.
        device: where the stages run.
        loss: which output of the model is differentiated; None where there is none.

    Attributes:
        later: where the schedule runs backward in two halves, by stage the list in which each backward of it has to put
            what it leaves for the second half. (Torch parts backward by walking the autograd graph of a stage. That of
            a parallelised stage is one operation, which torch would run twice, once for each half.)
        sums: by stage, where its backwards add up the gradients that are reduced once per step, by the last of them;
            none with a single microbatch. What that does not hide is awaited at the end of the step: other stages of
            the rank compute meanwhile.

    Raises:
        PipelineError: the ranks of the schedule wait for one another, or its last stage takes microbatches out of turn.
    """

    def __init__(
        self,
        stages: Sequence[tuple[StageModule, tuple[Tensors, Tensors]]],
        schedule: Schedule,
        station: PipelinePosition,
        device: torch.device,
        loss: Loss | None,
    ) -> None:
        self.schedule = schedule
        self.loss = loss
        self._calls = [(stage.index, StageCall(stage), messages) for stage, messages in stages]
        self._position = station
        self._group = station.group
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
        """Forward and backward of all microbatches; gradients of the batch's loss are added to `.grad`.

        Args:
            microbatches: inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank of the group.

        Raises:
            PipelineError: another rank died, or something else broke the step off: no step can follow.
        """
        assert self.loss is not None, "there is no loss to differentiate"
        if self._training is None:
            self._training = self._build_runtime(self._orders)
        losses, _ = self._step(self._training, microbatches, backward=True)
        return self._sum_from_last_stage(self.loss, losses)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Inputs]) -> tuple[torch.Tensor | None, list[tuple[torch.Tensor, ...]]]:
        """Forward of all microbatches.

        Args:
            microbatches: inputs of every microbatch.

        Returns:
            The loss of the batch, on every rank, or None where the model has none; and on the rank of the last stage
            what it returned for each microbatch.
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
        """One step; what ends it is told in words, since ranks that wait for a dead one hear of closed connections."""
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
        """Torch's runtime of these orders; its stages have buffers of their own for what they receive."""
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
        """For how much of the batch every microbatch counts in its loss; asked where the last stage runs."""
        last = self.schedule.placement[-1] == dist.get_rank(self._group)
        return loss_shares(self.loss.count if last and self.loss is not None else None, microbatches)

    def _sum_from_last_stage(self, loss: Loss, shares: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum of the shares that the rank of the last stage has, on every rank."""
        total = torch.zeros((), dtype=loss.dtype, device=self._device)
        for share in shares:
            total += share.detach()
        source = self._position.starts[self.schedule.placement[-1]]
        dist.broadcast(total, group=self._position.axis_group, group_src=source)
        return total


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__cause__ is None else _first_cause(error.__cause__)


def _pop_second_half(later: list[Callable[[], None]]) -> Callable[[], None]:
    """What the backward that has just run leaves for its second half."""
    return later.pop() if later else lambda: None


def _check_microbatch_order(schedule: Schedule) -> None:
    """Refuse an order of which torch would take the loss of one microbatch for that of another."""
    last = schedule.stages - 1
    parts = [part for action in schedule.orders[schedule.placement[last]] for part in action.computations]
    turns = [part.microbatch for part in parts if part.stage == last and part.kind == ActionKind.FORWARD]
    if turns != list(range(schedule.microbatches)):
        raise PipelineError(
            f"schedule {schedule.name} runs the last stage forward for microbatches {turns}: torch's runtime needs "
            f"them in their order there."
        )
