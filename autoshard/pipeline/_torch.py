"""The private torch names that this room uses, in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining.schedules import get_schedule_class

__all__ = ["order"]


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
