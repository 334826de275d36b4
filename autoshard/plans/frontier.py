"""`Frontier`: the Pareto-optimal plans of one model on one mesh, by memory and time."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeVar, overload

from autoshard import finite_json
from autoshard.errors import AutoshardError, BudgetError, PlanError
from autoshard.plans import picture, plan_data
from autoshard.plans.frontier_report import frontier_report, tradeoff_plot
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.report import HasReport, Report
from autoshard.units import format_bytes, format_seconds, parse_bytes

Item = TypeVar("Item")

FORMAT = "autoshard frontier"


class Frontier(Sequence[ShardingPlan], HasReport):
    """Plans from the smallest memory peak to the shortest step; no plan has both more memory and a longer step.

    Both are the planner's predictions: `plan.memory.peak` in bytes per device, `plan.step_seconds`. Selecting costs
    nothing, and each plan can be passed to `autoshard.parallelize(plan=...)`.

    Args:
        plans: plans of one model on one mesh, in any order; dominated plans are dropped.

    Raises:
        PlanError: `plans` is empty, or they are of different models or meshes.
    """

    def __init__(self, plans: Sequence[ShardingPlan]) -> None:
        if not plans:
            raise PlanError("a frontier of no plans: pass at least one.")
        # A step with its loss in pieces has another graph of the same model.
        graphs = {plan.is_in_pieces: plan.fingerprint for plan in plans}
        if any(plan.fingerprint != graphs[plan.is_in_pieces] or not _is_of_one_model(plan, plans[0]) for plan in plans):
            raise PlanError("these plans are of different models or meshes: a frontier is of one model on one mesh.")
        self.plans = tuple(pareto_front(plans, lambda plan: (plan.memory.peak, plan.step_seconds)))

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[ShardingPlan]:
        return iter(self.plans)

    @overload
    def __getitem__(self, index: int) -> ShardingPlan: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[ShardingPlan, ...]: ...
    def __getitem__(self, index: int | slice) -> ShardingPlan | tuple[ShardingPlan, ...]:
        return self.plans[index]

    def __repr__(self) -> str:
        first, last = self.plans[0], self.plans[-1]
        return (
            f"Frontier({len(self)} plans on {first.mesh}, {format_bytes(first.memory.peak)} at "
            f"{format_seconds(first.step_seconds)} to {format_bytes(last.memory.peak)} at "
            f"{format_seconds(last.step_seconds)})"
        )

    # Selecting

    def at(self, *, memory: int | str | None = None, step_seconds: float | None = None) -> ShardingPlan:
        """Return the best plan within a budget; pass exactly one of the two budgets.

        Args:
            memory: bytes per device, or a text such as `"24GiB"`: selects the fastest plan within it.
            step_seconds: seconds of a step: selects the plan with the smallest peak within it.

        Raises:
            BudgetError: no plan is within the budget; the message names the smallest feasible budget. Also for a text
                that is not an amount of memory.
            PlanError: neither or both are given, or the seconds are not a number above zero.
        """
        if (memory is None) == (step_seconds is None):
            raise PlanError("frontier.at takes one budget: memory=, such as memory='24GiB', or step_seconds=.")
        if memory is not None:
            return self._within_memory(parse_bytes(memory))
        assert step_seconds is not None
        return self._within_seconds(step_seconds)

    def _within_memory(self, limit: int) -> ShardingPlan:
        fitting = [plan for plan in self.plans if plan.memory.peak <= limit]
        if fitting:
            # Plans are sorted by memory, so the last one that fits is the fastest.
            fastest = fitting[-1]
            if fastest.replanner is None:
                return fastest
            # `why_not` then searches within the selected memory.
            return replace(fastest, replanner=fastest.replanner.within(limit))
        smallest = self.plans[0]
        memory = smallest.memory
        raise BudgetError(
            f"no plan of this frontier fits in {format_bytes(limit)} per device on mesh {smallest.mesh}: the smallest "
            f"peak is {format_bytes(memory.peak)} (parameters {format_bytes(memory.parameters)}, gradients "
            f"{format_bytes(memory.gradients)}, optimizer {format_bytes(memory.optimizer)}, activations "
            f"{format_bytes(memory.activations)}). Allow {memory.peak} bytes, add devices, or make the batch smaller."
        )

    def _within_seconds(self, seconds: float) -> ShardingPlan:
        if not seconds > 0:
            raise PlanError(f"step_seconds={seconds!r}: a step takes more than zero seconds.")
        fitting = [plan for plan in self.plans if plan.step_seconds <= seconds]
        if fitting:
            # The first one that is fast enough has the smallest peak.
            return fitting[0]
        fastest = self.plans[-1]
        raise BudgetError(
            f"no plan of this frontier has a step of {format_seconds(seconds)} or less on mesh {fastest.mesh}: the "
            f"shortest is predicted to take {format_seconds(fastest.step_seconds)}, with a peak of "
            f"{format_bytes(fastest.memory.peak)} per device. Allow {fastest.step_seconds!r} seconds, or add devices."
        )

    @property
    def turning_point(self) -> ShardingPlan:
        """The plan beyond which more memory saves little time, and below which less memory costs much.

        Memory and seconds are scaled so that each changes by 1 between the two ends of the frontier. The turning point
        is the plan farthest below the straight line between the ends: before it, a share of memory saves more than an
        equal share of time, after it less. It is the fastest plan if no plan is below the line.

        Source: TensorOpt 5.1 describes it, but reads it off the figure.
        """
        first, last = self.plans[0], self.plans[-1]

        def below(plan: ShardingPlan) -> float:
            # 1 - more - slower is the distance below the line between the ends, on which both shares sum to 1.
            more = (plan.memory.peak - first.memory.peak) / (last.memory.peak - first.memory.peak)
            slower = (plan.step_seconds - last.step_seconds) / (first.step_seconds - last.step_seconds)
            return 1.0 - more - slower

        inner = self.plans[1:-1]
        best = max(inner, key=below, default=last)
        return best if inner and below(best) > 0 else last

    # For the eye

    def report(self, chosen: ShardingPlan | None = None) -> Report:
        """Return the plans by memory and time, and details of one of them.

        Args:
            chosen: the plan that is marked and shown with all charts, such as `frontier.at(memory="24GiB")`; by default
                the turning point.

        Raises:
            PlanError: `chosen` is not a plan of this frontier.
        """
        turning = self.turning_point
        return frontier_report(self.plans, turning, turning if chosen is None else self._own(chosen))

    def _own(self, chosen: ShardingPlan) -> ShardingPlan:
        """Return the plan of this frontier that was selected as `chosen`."""
        # By peak and the identity of the decisions: comparing plans by value takes long. All peaks differ.
        peak, decisions = chosen.memory.peak, chosen.decisions
        own = next((plan for plan in self.plans if plan.memory.peak == peak and plan.decisions is decisions), None)
        if own is None:
            raise PlanError("chosen= is not a plan of this frontier: select one by its number, or with at(...).")
        return own

    @overload
    def to_html(self, path: None = None, *, chosen: ShardingPlan | None = None) -> str: ...
    @overload
    def to_html(self, path: str | os.PathLike[str], *, chosen: ShardingPlan | None = None) -> None: ...
    def to_html(self, path: str | os.PathLike[str] | None = None, *, chosen: ShardingPlan | None = None) -> str | None:
        """Write the page of `report(chosen)` to a file, or return its text if there is no path."""
        return self.report(chosen).write_page(path)

    def plot(self, path: str | os.PathLike[str], *, scale: Literal["linear", "log"] = "linear") -> None:
        """Draw the frontier to a file: the fastest step for each amount of memory, the turning point, common devices.

        Args:
            path: the path of the picture; its suffix sets the format, such as `.png`, `.svg` or `.pdf`.
            scale: the scale of both axes.

        Raises:
            PlanError: matplotlib is not installed, or the scale is neither.
        """
        if scale not in ("linear", "log"):
            raise PlanError(f'scale={scale!r}: choose "linear" or "log".')
        turning, is_log = self.turning_point, scale == "log"
        plot = tradeoff_plot(self.plans, turning, turning)
        scaled = replace(plot, x=replace(plot.x, is_log=is_log), y=replace(plot.y, is_log=is_log))
        picture.save(scaled, path, f"mesh {turning.mesh} on cluster {turning.cluster}")

    # Files

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plans to one JSON file."""
        # Each plan has its own checksum, so that the error names the number of an edited one.
        texts = [plan.to_json() for plan in self.plans]
        Path(path).write_text(json.dumps({"format": FORMAT, "version": 1, "plans": texts}, indent=1), "utf-8")

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Frontier:
        """Return the frontier that `save` wrote.

        Raises:
            PlanError: the file cannot be read, is not a frontier, or one of its plans was edited or cut short.
        """
        text, what = plan_data.read(path, "frontier")
        try:
            data = finite_json.read(text)
            if data["format"] != FORMAT or data["version"] != 1:
                raise PlanError(
                    f"{what} is of format {data['format']!r}, version {data['version']!r}: not one of ours."
                )
            texts = list(data["plans"])
        except AutoshardError:
            # Some subclasses are ValueErrors, too.
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise PlanError(f"{what} is not a frontier: was it cut short, or is it a plan's file?") from error
        return Frontier([ShardingPlan.from_json(text, f"plan {number} of {what}") for number, text in enumerate(texts)])


def pareto_front(items: Iterable[Item], key: Callable[[Item], tuple[int, float]]) -> list[Item]:
    """Return the items that no other one dominates by the numbers of `key`, in the order of the first number."""
    kept: list[Item] = []
    # In this order, a dominated item is dominated by an earlier one.
    for item in sorted(items, key=key):
        if not kept or key(item)[1] < key(kept[-1])[1]:
            kept.append(item)
    return kept


def _is_of_one_model(plan: ShardingPlan, other: ShardingPlan) -> bool:
    return plan.mesh == other.mesh and plan.shapes == other.shapes
