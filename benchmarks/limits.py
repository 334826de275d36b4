"""Plans within memory limits: python benchmarks/limits.py [--model NAME] [--mesh 8x8] [--limits 10] [--quick]

Models of real width, most of them cut to a few layers, on (8,), (4, 8) and (8, 8) H100s; and Llama-3-8B with all its
layers on (8, 8), 64 sequences of 4096 in bfloat16 over parameters in float32. Each is captured once, and planned
without a limit and within limits from the smallest peak that is found to the peak without a limit, at equal ratios. A
row has the predicted step, the peak, the gap that the plan tells, what the plan did, and processor seconds of planning
after capture. Checked and printed: that no plan of a table fits a limit at which a slower plan was taken (so that of
two limits the smaller never gives the faster plan), and the mean and the largest gap.

`--write FILE` keeps the figures; `--beside FILE` plans within the limits of the file, in bytes, and prints how long
steps are over those of the file's fastest plans that fit. `published/limits.json`, beside which tables are printed by
default, has what the planner found that ran layers again whole or not at all.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import architectures
import torch
from architectures import Example
from published.models import t5_large
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import MixedPrecisionPolicy

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from autoshard.capture.bound_call import BoundCall  # noqa: E402
from autoshard.capture.joint import JointGraph  # noqa: E402
from autoshard.capture.recomputation import recomputable  # noqa: E402
from autoshard.errors import BudgetError  # noqa: E402
from autoshard.options import OFFLOAD, OFFLOAD_OPTIMIZER, RECOMPUTE, Search  # noqa: E402
from autoshard.options.options import collect_options  # noqa: E402
from autoshard.options.target import Target  # noqa: E402
from autoshard.planner.planner import Planner  # noqa: E402
from autoshard.planner.planning import (  # noqa: E402
    CapturedCall,
    PlannerCache,
    capture_with_progress,
    run_planner,
)
from autoshard.planner.shares import plan_shares  # noqa: E402
from autoshard.plans.expenses import count_rerun  # noqa: E402
from autoshard.plans.sharding_plan import ShardingPlan  # noqa: E402
from autoshard.specs.axes import MeshShape  # noqa: E402
from tests.models.sparse import Recommender  # noqa: E402

MESHES = {"8": {"x": 8}, "4x8": {"dp": 4, "tp": 8}, "8x8": {"dp": 8, "tp": 8}}
BESIDE = ROOT / "benchmarks" / "published" / "limits.json"
GIB = 2**30
LIMITS = 10


def dlrm(batch: int) -> Example:
    """A recommender with 26 tables of 400,000 rows, 128 wide, one index to a bag."""
    with torch.device("meta"):
        inputs = {
            "dense": torch.empty(batch, 12),
            "sparse": torch.empty(batch, 26, 1, dtype=torch.long),
            "labels": torch.empty(batch),
        }
        return Recommender(26, 400_000, 128), inputs


@dataclass(frozen=True, slots=True)
class Case:
    """A model to plan.

    Attributes:
        build: makes it, given `batch`, and `layers` if it has them.
        batch: samples for eight devices; more devices get more.
        layers: its layers, in the table and with `--quick`; None if its depth is not in layers.
        meshes: names of the meshes.
        options: of the plan.
    """

    build: Callable[..., Example]
    batch: int
    layers: tuple[int, int] | None = None
    meshes: tuple[str, ...] = tuple(MESHES)
    options: Mapping[str, Any] = field(default_factory=dict)

    def example(self, devices: int, quick: bool) -> Example:
        """Return the module and the arguments of a call."""
        depth = {} if self.layers is None else {"layers": self.layers[quick]}
        return self.build(batch=self.batch * devices // 8, **depth)


_8B = functools.partial(architectures.llama3_8b, dtype=torch.float32)
_BFLOAT16 = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}
CASES = {
    "Llama-3-8B": Case(_8B, 8, (32, 6), ("8x8",), _BFLOAT16),
    "GPT-2": Case(architectures.gpt2_medium, 64, (6, 2)),
    "Llama": Case(architectures.llama3_8b, 16, (4, 2)),
    "Mixtral": Case(architectures.mixtral_8x7b, 8, (2, 1)),
    "T5": Case(lambda batch, layers: t5_large(batch, layers / 24), 64, (4, 2)),
    "ViT": Case(architectures.vit_large, 512, (6, 2)),
    "U-Net": Case(architectures.unet, 128),
    "ResNet-50": Case(architectures.resnet50, 512),
    "DLRM": Case(dlrm, 524_288),
    "Whisper": Case(architectures.whisper_medium, 64, (4, 2)),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A plan within a limit in bytes; None: without one. A plan that was not found has no step."""

    limit: int | None
    step: float | None
    peak: int | None
    gap: float
    did: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Planned:
    """The plans of one model on one mesh, from the one without a limit to the leanest one."""

    model: str
    mesh: str
    capture: float
    rows: tuple[Row, ...]

    @property
    def name(self) -> str:
        return f"{self.model} on {tuple(MESHES[self.mesh].values())}"

    @staticmethod
    def read(data: Mapping[str, Any]) -> Planned:
        return Planned(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


def limits_between(least: int, most: int, count: int) -> list[int]:
    """Return so many limits at equal ratios, the largest first; the smallest is `least`."""
    ratio = most / least
    return [round(least * ratio ** (1 - place / max(count - 1, 1))) for place in range(count)]


class Planning:
    """Plans of a captured step on one mesh.

    Args:
        module: the module.
        graph: its step.
        mesh: the mesh axes.
        options: of all plans.
    """

    def __init__(self, module: torch.nn.Module, graph: JointGraph, mesh: MeshShape, options: Mapping[str, Any]) -> None:
        self.module, self.graph, self.mesh, self.options = module, graph, mesh, options
        self.layers = len(recomputable(graph))

    def call(self, limit: int | None) -> CapturedCall:
        """Return the call, of which nothing is known yet."""
        target = Target.of(collect_options("plan", {**self.options, "memory_limit": limit}), None)
        return CapturedCall(self.graph, 0.0, self.mesh, target, PlannerCache(self.module, self.mesh))

    def planner(self) -> Planner:
        """Return the planner without a limit."""
        call = self.call(None)
        return call.planner_of(replace(call.target, shares=None))

    def plan(self, limit: int | None) -> tuple[ShardingPlan | None, Row]:
        """Plan within a limit; return the plan, if one fits, and its row."""
        start = time.process_time()
        try:
            plan = plan_shares(self.call(limit))
        except BudgetError as error:
            return None, Row(limit, None, error.peak, 1.0, "no plan", time.process_time() - start)
        seconds = time.process_time() - start
        return plan, Row(limit, plan.step_seconds, plan.memory.peak, plan.gap, self.did(plan), seconds)

    def smallest_peak(self) -> int:
        """Return the smallest peak that is found."""
        call = self.call(1)
        try:
            target = replace(call.target, shares=None)
            return run_planner(call.planner_of(target), 0.0, target, explained=False).memory.peak
        except BudgetError as error:
            return error.peak or 0

    def did(self, plan: ShardingPlan) -> str:
        """What the plan did to keep its limit."""
        again = f"{count_rerun([plan])} of {self.layers} layers run again, " if plan.recomputed else ""
        again += f"{len(plan.hosted)} parameters updated on the host, " if plan.hosted else ""
        again += f"{plan.memory.host / GIB:.1f} GiB on the host, " if plan.memory.host else ""
        return f"{again}{plan.method}"


def planned(name: str, mesh_name: str, args: argparse.Namespace, beside: Planned | None) -> Planned:
    """Plan a model on a mesh, within the limits of `beside` if there is one."""
    case, mesh = CASES[name], MeshShape.of(MESHES[mesh_name])
    module, inputs = case.example(mesh.size, args.quick)
    search = Search(time_limit=args.time_limit, work_limit=args.work_limit)
    # Whole logits, which no training reads, would be most of what a device holds.
    options = {"cluster": args.cluster, "search": search, "recompute": args.recompute, "output_placements": "planned"}
    options |= {"offload": args.offload, "offload_optimizer": args.offload_optimizer}
    options |= case.options
    target = Target.of(collect_options("plan", options), None)
    start = time.process_time()
    graph, _ = capture_with_progress(BoundCall.of(module, (), inputs), target, devices=mesh.size)
    capture = time.process_time() - start
    planning = Planning(module, graph, mesh, options)
    rows: list[Row] = []

    def plan(limit: int | None) -> None:
        rows.append(planning.plan(limit)[1])
        print(f"{name} {mesh_name}: {rows[-1]}", file=sys.stderr, flush=True)

    plan(None)
    if beside is not None and args.limits is None:
        limits = [row.limit for row in beside.rows if row.limit is not None]
    else:
        assert rows[0].peak is not None
        limits = limits_between(planning.smallest_peak(), rows[0].peak, (args.limits or LIMITS) + 1)[1:]
    for limit in limits:
        plan(limit)
    return Planned(name, mesh_name, capture, tuple(rows))


def faults(rows: Sequence[Row]) -> Iterator[str]:
    """Say where a plan of the table fits a limit and is faster than the plan that was taken, or none was found."""
    for row in rows:
        fitting = [one for one in rows if one.step and one.peak and (row.limit is None or one.peak <= row.limit)]
        best = min(fitting, key=lambda one: one.step or 0.0, default=None)
        if best is not None and best.step is not None and (row.step is None or row.step > best.step * (1 + 1e-6)):
            steps = f"{_milliseconds(row.step)} ms, and {_milliseconds(best.step)} ms"
            yield f"within {_gib(row.limit)} GiB the plan takes {steps} that of {_gib(best.limit)} GiB, which fits too"


def _gib(bytes: int | None) -> str:
    return "none" if bytes is None else f"{bytes / GIB:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "none" if seconds is None else f"{1e3 * seconds:.2f}"


def ratios(found: Planned, beside: Planned | None) -> list[float | None]:
    """Return the step of every row over that of the fastest plan beside that fits its limit."""

    def known(limit: int | None) -> float:
        rows = () if beside is None else beside.rows
        fitting = (row for row in rows if row.peak is not None and (limit is None or row.peak <= limit))
        return min((row.step for row in fitting if row.step is not None), default=math.nan)

    over = [row.step / known(row.limit) if row.step else math.nan for row in found.rows]
    return [None if math.isnan(ratio) else ratio for ratio in over]


def table(found: Planned, beside: Planned | None) -> Table:
    result = Table(title=f"{found.name}, captured in {found.capture:.1f} s", title_justify="left")
    for label in ("limit, GiB", "step, ms", "peak, GiB", "gap", "over whole layers", "CPU s"):
        result.add_column(label, justify="right")
    result.add_column("what the plan did")
    for row, ratio in zip(found.rows, ratios(found, beside), strict=True):
        result.add_row(
            _gib(row.limit),
            _milliseconds(row.step),
            _gib(row.peak),
            f"{row.gap:.2%}",
            "" if ratio is None else f"{ratio:.3f}",
            f"{row.seconds:.1f}",
            row.did,
        )
    return result


def summary(found: Sequence[Planned], before: Mapping[tuple[str, str], Planned]) -> Table:
    """One line for each model and mesh."""
    result = Table(title="gaps, and steps over those of whole layers", title_justify="left")
    labels = ("", "limits", "mean gap", "largest", "in order", "mean ratio", "largest", "CPU s a plan", "of capture")
    for label in labels:
        result.add_column(label, justify="right" if label else "left")
    for one in found:
        limited = [row for row in one.rows if row.limit is not None]
        gaps = [row.gap for row in limited] or [0.0]
        known = [ratio for ratio in ratios(one, before.get((one.model, one.mesh))) if ratio is not None]
        seconds = mean([row.seconds for row in limited] or [0.0])
        result.add_row(
            one.name,
            f"{len(limited)}",
            f"{mean(gaps):.2%}",
            f"{max(gaps):.2%}",
            "no" if any(faults(one.rows)) else "yes",
            f"{mean(known):.3f}" if known else "",
            f"{max(known):.3f}" if known else "",
            f"{seconds:.1f}",
            f"{seconds / one.capture:.2f}",
        )
    gaps = [row.gap for one in found for row in one.rows if row.limit is not None]
    if gaps:
        result.caption = f"all {len(gaps)} limits: mean gap {mean(gaps):.2%}, largest {max(gaps):.2%}"
    return result


def read(path: Path, quick: bool) -> dict[tuple[str, str], Planned]:
    """Return the figures of a file by model and mesh; none if there is no file."""
    data = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = map(Planned.read, data.get(_part(quick), []))
    return {(one.model, one.mesh): one for one in kept}


def write(path: Path, quick: bool, found: Sequence[Planned]) -> None:
    """Put figures in a file; those of other models and meshes stay."""
    data = json.loads(path.read_text("utf-8")) if path.exists() else {}
    kept = {**read(path, quick), **{(one.model, one.mesh): one for one in found}}
    data[_part(quick)] = [asdict(one) for one in kept.values()]
    path.write_text(json.dumps(data, indent=1) + "\n", "utf-8")


def _part(quick: bool) -> str:
    return "quick" if quick else "full"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=CASES, action="append", help="default: all")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="default: all that the model is planned on")
    parser.add_argument("--limits", type=int, help=f"number of limits; default: those of the file, else {LIMITS}")
    parser.add_argument("--quick", action="store_true", help="models of fewer layers")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--recompute", choices=RECOMPUTE, default="auto", help="what may run again; default: auto")
    parser.add_argument("--offload", choices=OFFLOAD, default="none", help="what may move to the host; default: none")
    text = "optimizer state that may be on the host; default: none"
    parser.add_argument("--offload-optimizer", choices=OFFLOAD_OPTIMIZER, default="none", help=text)
    parser.add_argument("--time-limit", type=float, default=600.0, help="seconds of the search for a plan")
    parser.add_argument("--work-limit", type=int, help="of the solver, for a problem")
    parser.add_argument("--beside", type=Path, default=BESIDE, help="figures to print beside, whose limits are taken")
    parser.add_argument("--write", type=Path, help="file to put the figures in")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console = Console(width=170)
    before = read(args.beside, args.quick)
    found = []
    for name in args.model or CASES:
        for mesh in args.mesh or CASES[name].meshes:
            beside = before.get((name, mesh))
            found.append(planned(name, mesh, args, beside))
            console.print(table(found[-1], beside))
            for fault in faults(found[-1].rows):
                console.print(fault)
            if args.write:
                write(args.write, args.quick, found)
    console.print(summary(found, before))
    sys.exit(any(any(faults(one.rows)) for one in found))


if __name__ == "__main__":
    main()
