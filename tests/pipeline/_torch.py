"""The private torch names that these tests use, in one place."""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _add_reduce_grad,
    _add_send_recv,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

__all__ = ["run_csv_schedule", "run_schedule", "with_messages"]


class _Stub:
    """A stage that computes nothing and writes down what it is told to do."""

    def __init__(self, stage: int, rank: int, ranks: int, stages: int, calls: list[str]) -> None:
        self.stage_index, self.num_stages = stage, stages
        self.group_rank, self.group_size = rank, ranks
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        self.device, self.submod, self.output_chunks = "cpu", None, []
        self.stage_index_to_group_rank: dict[int, int] = {}
        self.args_recv_info: dict[int, tuple[Any, ...]] = {0: ()}
        self.act_send_info: dict[int, list[int]] = {}
        self.calls = calls

    def forward_one_chunk(self, microbatch: int, *args: Any, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}F{microbatch}")

    def backward_one_chunk(self, microbatch: int, *args: Any, full_backward: bool = True, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}{'B' if full_backward else 'I'}{microbatch}")

    def backward_weight_one_chunk(self, microbatch: int, **kwargs: Any) -> None:
        self.calls.append(f"{self.stage_index}W{microbatch}")

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Everything else that a schedule calls: nothing is received, nothing is sent."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: []


def run_schedule(name: str, placement: Sequence[int], ranks: int, microbatches: int) -> list[list[str]]:
    """The computations that torch's schedule of this name runs on every rank, on stages that do nothing."""
    schedule_class: Any = get_schedule_class(name)
    single = issubclass(schedule_class, PipelineScheduleSingle)
    return _run(placement, ranks, lambda stages: schedule_class(stages[0] if single else stages, microbatches))


def run_csv_schedule(
    rows: Sequence[Sequence[object]], form: str, placement: Sequence[int], ranks: int, microbatches: int, folder: Path
) -> list[list[str]]:
    """The computations that torch's runtime runs on every rank from a file of these actions."""
    file = folder / "actions.csv"
    with file.open("w") as stream:
        csv.writer(stream, lineterminator="\n").writerows([str(action) for action in row] for row in rows)

    def load(stages: list[_Stub]) -> Any:
        runtime: Any = _PipelineScheduleRuntime(stages, microbatches)  # type: ignore
        runtime._load_csv(str(file), format=form)
        return runtime

    return _run(placement, ranks, load)


def _run(placement: Sequence[int], ranks: int, make: Callable[[list[_Stub]], Any]) -> list[list[str]]:
    rows: list[list[str]] = [[] for _ in range(ranks)]
    for rank, calls in enumerate(rows):
        held = [stage for stage, holder in enumerate(placement) if holder == rank]
        make([_Stub(stage, rank, ranks, len(placement), calls) for stage in held])._step_microbatches()
    return rows


def with_messages(actions: Sequence[Sequence[str]], placement: Sequence[int], microbatches: int) -> list[list[str]]:
    """What torch's runtime makes of lists of computations: the same with reductions, sends and receives."""
    reduced: dict[int, Any] = {
        rank: _add_reduce_grad([_Action.from_str(action) for action in row], microbatches)
        for rank, row in enumerate(actions)
    }
    made = _add_send_recv(reduced, stage_to_rank=lambda stage: placement[stage], num_stages=len(placement))
    return [[str(action) for action in made[rank]] for rank in range(len(actions))]
