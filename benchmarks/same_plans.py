"""Some sixty requests before and after a change of the planner: benchmarks/same_plans.py --write FILE | --compare FILE

Small models of the tests on meshes of one to three axes: plans with memory limits that can and cannot be kept,
recomputation, dynamic sizes, shares of the batch, precisions, hints, local inputs and pipelines; frontiers, searches of
meshes, answers to why a plan is not another one, and comparisons with standard layouts. A search takes a count of
steps, not of seconds, so that the answers are the same on every machine. For each plan in an answer: the predicted
seconds of a step, the bytes of the peak, the lower bound; of a limit that no plan keeps, the smallest peak. `--compare`
asks again, under the same limits in bytes: it says which answers have slower plans by more than a millionth, looser
bounds or larger smallest peaks, and how many processor seconds they took beside what the file says.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import autoshard  # noqa: E402
from tests import models  # noqa: E402
from tests.option_groups import grouped  # noqa: E402
from tests.training import fast_links  # noqa: E402

WORK = 20_000_000
"""Steps of a search, some seconds of it."""

LINE, SQUARE, CUBE = {"dp": 8}, {"dp": 2, "tp": 4}, {"pod": 2, "dp": 2, "tp": 2}
PIPELINE = {"pp": 2, "dp": 2}
TOKENS = {"input_ids": {0: "batch"}, "labels": {0: "batch"}}
STAGES = {"schedule": "1F1B", "microbatches": 2}


Point = dict[str, Any]
"""A plan: seconds of its step, bytes of its peak, its lower bound. A limit that no plan keeps: the smallest peak."""
Answer = dict[str, Point]
"""What a request found, by names that tell the points from one another."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a mesh and the options of its plan.

    Attributes:
        model: its name in the zoo.
        mesh: its axes; a search asks for as many devices.
        options: of the request.
        share: the part of the peak without a limit that is the memory limit; 0 for no limit.
        ask: what is asked for, one of `REQUESTS`.
        asked: hints, of what a plan is asked why it does not have it.
    """

    model: str
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 0.0
    ask: str = "plan"
    asked: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What tells the case from the others."""
        said = [
            *([self.ask] * (self.ask != "plan")),
            *(f"{key}={value}" for key, value in {**self.options, **self.asked}.items()),
            *([f"limit {self.share}"] * bool(self.share)),
        ]
        return f"{self.model} on {self.mesh}: {', '.join(said) or 'as it is'}"


PLAIN = (
    "mlp",
    "gpt",
    "hf_gpt2",
    "hf_llama",
    "hf_bert",
    "hf_vit",
    "resnet18",
    "hf_t5",
    "hf_mixtral",
    "unet",
    "gnmt",
    "dlrm",
)
CASES = [
    *(Case(model, (LINE, SQUARE, CUBE)[place % 3]) for place, model in enumerate(PLAIN)),
    *(Case(model, SQUARE) for model in ("hf_deepseek_v3", "hf_swin", "hf_whisper", "gshard")),
    *(Case(model, LINE, share=share) for model in ("gpt", "hf_llama", "resnet18") for share in (0.95, 0.85)),
    *(Case(model, SQUARE, {"recompute": "full"}) for model in ("gpt", "hf_bert")),
    *(Case(model, LINE, {"effort": "fast"}) for model in ("hf_llama", "unet")),
    *(Case(model, SQUARE, {"dynamic": TOKENS}) for model in ("gpt", "hf_llama")),
    Case("gpt", {"dp": 2}, {"dynamic": TOKENS, "shares": {"dp": (2, 1)}}),
    Case("mlp", {"tp": 2}, {"shares": {"tp": (3, 1)}, "hints": {"*.weight": {"tp": Shard(0)}}}),
    Case("gpt", SQUARE, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    Case("hf_bert", SQUARE, {"hints": {"*.query.weight": {"tp": Shard(0)}}}),
    Case("gpt", LINE, {"inputs": "local"}),
    Case("hf_gpt2", SQUARE, {"output_placements": "planned"}),
    Case("gpt", LINE, {"compile": True}),
    Case("hf_llama", SQUARE, {"optimizer": "sgd"}),
    *(Case(model, PIPELINE, STAGES) for model in ("gpt", "hf_llama", "hf_t5", "unet")),
    *(Case(model, SQUARE, share=0.8) for model in ("gpt", "hf_t5", "hf_mixtral", "hf_whisper")),
    *(Case(model, LINE, share=0.7) for model in ("unet", "dlrm", "hf_vit")),
    *(Case(model, LINE, share=0.2) for model in ("gpt", "resnet18")),  # no plan keeps these
    *(Case("gpt", LINE, {"method": method}, 0.9) for method in ("force", "ilp")),
    Case("gpt", SQUARE, {"recompute": "none"}, 0.8),
    Case("gpt", CUBE, share=0.9),
    Case("gpt", SQUARE, {"accumulate": 4}),
    Case("gpt", PIPELINE, STAGES, 0.9),
    *(Case(model, LINE, {"gaps": 1}, ask="frontier") for model in ("mlp", "gpt", "resnet18")),
    Case("gpt", LINE, {"gaps": 0, "recompute": "auto"}, ask="frontier"),
    Case("gpt", {"": 8}, {"pipelines": False, "effort": "fast"}, ask="search"),
    Case("gpt", {"": 4}, {"effort": "fast"}, ask="search"),
    Case("mlp", {"": 4}, {"option": "profiling", "pipelines": False}, ask="search"),
    Case("hf_bert", SQUARE, ask="why", asked={"*.query.weight": {"tp": Shard(0)}}),
    Case("gpt", LINE, ask="why", share=0.9, asked={"*": autoshard.replicate("dp")}),
    Case("gpt", PIPELINE, STAGES, ask="why", asked={"*.weight": {"dp": Shard(0)}}),
    Case("gpt", SQUARE, ask="compare"),
    Case("hf_llama", LINE, ask="compare"),
]


def plans(case: Case, module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> Answer:
    """The plan, or the smallest peak."""
    try:
        return {"": _point(autoshard.plan(module, case.mesh, (), inputs, **options))}
    except autoshard.BudgetError as error:
        return {"": {"smallest": error.peak}}


def frontiers(case: Case, module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> Answer:
    """Every plan of the frontier, by its place."""
    found = autoshard.frontier(module, case.mesh, (), inputs, **options)
    return {f"{place}": _point(plan) for place, plan in enumerate(found)}


def searches(case: Case, module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> Answer:
    """The best plan of every number of devices."""
    result = autoshard.search(module, math.prod(case.mesh.values()), (), inputs, **options)
    best = result.by_devices.items()
    return {f"{count} devices": {**_point(one.plan), "mesh": one.text} for count, one in best}


def whys(case: Case, module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> Answer:
    """The plan, and the other one that has what is asked for."""
    plan = autoshard.plan(module, case.mesh, (), inputs, **options)
    other = plan.why_not(case.asked)
    found = {"plan": _point(plan), "other": {"verdict": other.verdict}}
    if other.plan is not None:
        found["other"] |= _point(other.plan)
    return found


def comparisons(case: Case, module: torch.nn.Module, inputs: Any, options: dict[str, Any]) -> Answer:
    """Every layout that can be had."""
    compared = autoshard.compare(module, case.mesh, (), inputs, **options)
    return {layout.name: _point(layout.plan) for layout in compared if layout.plan is not None}


REQUESTS: dict[str, Callable[[Case, torch.nn.Module, Any, dict[str, Any]], Answer]] = {
    "plan": plans,
    "frontier": frontiers,
    "search": searches,
    "why": whys,
    "compare": comparisons,
}


def _point(plan: Any) -> Point:
    if isinstance(plan, autoshard.PipelinePlan):  # it says no bound of its own
        return {"step": plan.step_seconds, "peak": max(plan.peaks), "bound": 0.0}
    return {"step": plan.step_seconds, "peak": plan.memory.peak, "bound": plan.lower_bound}


def answer(case: Case, limit: int | None = None) -> dict[str, Any]:
    """The answer to a request, its memory limit, and the processor seconds that it took, capture among them.

    `limit` is that of an earlier answer, so that both are of the same question; else it is the case's share.
    """
    module, inputs = models.ZOO[case.model]()
    options = grouped({"cluster": fast_links(), "work_limit": WORK, "time_limit": 600.0, **case.options})
    if case.share:
        options["memory_limit"] = limit or int(
            _point(autoshard.plan(module, case.mesh, (), inputs, **options))["peak"] * case.share
        )
    start = time.process_time()
    points = REQUESTS[case.ask](case, module, inputs, options)
    return {"points": points, "limit": options.get("memory_limit"), "planning": time.process_time() - start}


def worse(case: Case, now: Answer, before: Answer) -> list[str]:
    """What is worse than before, in words; nothing where nothing is."""
    # The places on a frontier change with their number: a plan is there if one as lean is as fast.
    if case.ask == "frontier":
        lost = [point for point in before.values() if not any(_covers(new, point) for new in now.values())]
        return [f"nothing is as good as {point}" for point in lost]
    return [f"{name} {fault}".strip() for name, point in before.items() for fault in _faults(now.get(name), point)]


def _covers(new: Mapping[str, float], old: Mapping[str, float]) -> bool:
    return all(new[key] <= old[key] * (1 + 1e-6) for key in ("step", "peak"))


def _faults(now: Point | None, before: Point) -> Iterator[str]:
    if now is None:
        yield "is missing"
        return
    if now.get("verdict") != before.get("verdict"):
        yield f"is {now.get('verdict')} and was {before.get('verdict')}"
    for key, better in (("step", "slower"), ("smallest", "needs more")):
        # A plan where none was found is better than every smallest peak.
        if key in before and now.get(key, 0.0 if key == "smallest" else math.inf) > before[key] * (1 + 1e-6):
            yield better
    if "bound" in now and now["bound"] < before.get("bound", 0.0) * (1 - 1e-6):
        yield "has a looser bound"


def write(path: Path, found: Mapping[str, Any]) -> None:
    """Put answers in a file; those to other requests stay."""
    kept = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(kept | found, indent=1) + "\n", "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="answers to other requests stay in the file")
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="requests whose names hold this text")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    before = json.loads(asked.compare.read_text("utf-8")) if asked.compare else {}
    found: dict[str, dict[str, Any]] = {}
    faults: dict[str, list[str]] = {}
    for case in CASES:
        if asked.only in case.name:
            known = before.get(case.name)
            found[case.name] = answered = answer(case, known and known["limit"])
            faults[case.name] = worse(case, answered["points"], known["points"]) if known else []
            print(case.name, answered, "; ".join(faults[case.name]), flush=True)
            if asked.write:
                write(asked.write, found)
    common = found.keys() & before.keys()
    if common:
        ratio = sum(found[name]["planning"] for name in common) / sum(before[name]["planning"] for name in common)
        slower = sum(map(bool, faults.values()))
        print(f"{len(common)} requests, {slower} of them worse; they take {ratio:.2f} of what they took")
        sys.exit(bool(slower))


if __name__ == "__main__":
    main()
