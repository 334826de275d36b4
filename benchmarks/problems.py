"""The solver on problems of the planner: python benchmarks/problems.py --write FOLDER | --compare FOLDER [--only TEXT]

`--write` captures some twenty steps, from small models of the tests to models of real width, builds about sixty of
their problems as the planner does (without memory, with a limit, at several prices of memory, with collectives that
compute hides; of stages of a pipeline, with shares of the batch, with layers that run again), solves each as the
planner does, and writes the problems and what was found to a folder. `--compare` needs no model: it reads the problems,
solves them again, and prints cost, lower bound, seconds and peak beside those of the folder; it fails where a cost is
higher or a bound is lower by more than a millionth. Searches take a count of steps, not of seconds, so that results
are the same on every machine. `--alone` leaves out all that the planner does around its solver.
"""

from __future__ import annotations

import argparse
import functools
import json
import logging
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import architectures
import numpy as np
import torch
from problem_files import Kind, RecordedProblem, load, save
from rich.console import Console
from rich.table import Table
from same_plans import CUBE, LINE, SQUARE, TOKENS, WORK
from solver import ring

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.recomputation import recomputable
from autoshard.options.options import collect_options
from autoshard.options.target import Target
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import cut
from autoshard.pipeline.plan.stage_plans import StageBudget, StagePlanner, StageTarget
from autoshard.planner.budget_search import forceable_parameters, memory_prices, peak_weights
from autoshard.planner.candidate_plan import CandidatePlan
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planner import Planner, compute_after
from autoshard.planner.planning import recomputing_planner
from autoshard.planner.planning_problem import BuiltProblem, OverlapDiscount
from autoshard.planner.solving import SolveOptions, SolveResult, is_large, solve_problem
from autoshard.planner.tiling import Tiling
from autoshard.solver import solve
from autoshard.solver.solver_budget import Budget
from autoshard.specs.axes import MeshShape
from tests import models
from tests.option_groups import grouped
from tests.pipeline.chain import balance_stages
from tests.training import fast_links

SECONDS = 3600.0
"""The latest end of one search, which none comes near."""

LONG = {"dp": 8, "tp": 8}
LIMIT = 0.9
"""The part of the peak without a limit that a limit leaves."""

STRENGTHS = {"cheap memory": 0.03, "dear memory": 3.0, "memory alone": 1e3}
"""Costs of all the memory of a plan, in costs of its step."""

FEW = ("plain", "cheap memory", "memory alone")
MANY = ("plain", "limited", "hidden", *STRENGTHS)


@dataclass(frozen=True, slots=True)
class Step:
    """A step whose problems are recorded.

    Attributes:
        build: makes the module, and keyword arguments of a call.
        mesh: the mesh axes.
        names: of the problems that are built.
        options: of the plan.
        stage: the stage of two that is planned in place of the model; None for the model.
        again: True if every layer runs again in the backward half.
    """

    build: Callable[[], Any]
    mesh: Mapping[str, int]
    names: tuple[str, ...] = FEW
    options: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    again: bool = False


_FEW_LAYERS = functools.partial(architectures.llama3_8b, layers=8, batch=64)
SHARED = {"dynamic": TOKENS, "shares": {"dp": (2, 1)}}
H100 = {"cluster": "h100", "output_placements": "planned"}
STEPS = {
    "mlp": Step(models.ZOO["mlp"], LINE, MANY),
    "gpt": Step(models.ZOO["gpt"], SQUARE, MANY),
    "gpt, three axes": Step(models.ZOO["gpt"], CUBE),
    "gpt, shares": Step(models.ZOO["gpt"], {"dp": 2}, FEW, SHARED),
    "gpt, four runs a step": Step(models.ZOO["gpt"], SQUARE, ("plain", "hidden"), {"accumulate": 4}),
    "hf_llama": Step(models.ZOO["hf_llama"], LINE, MANY),
    "hf_llama, stage 1 of 2": Step(models.ZOO["hf_llama"], SQUARE, stage=0),
    "hf_llama, stage 2 of 2": Step(models.ZOO["hf_llama"], SQUARE, stage=1),
    "hf_llama, run again": Step(models.ZOO["hf_llama"], SQUARE, again=True),
    "resnet18": Step(models.ZOO["resnet18"], LINE, ("plain", "limited", *STRENGTHS)),
    "hf_t5": Step(models.ZOO["hf_t5"], LINE),
    "hf_mixtral": Step(models.ZOO["hf_mixtral"], SQUARE, ("plain", "dear memory")),
    "hf_whisper": Step(models.ZOO["hf_whisper"], SQUARE, ("plain", "dear memory")),
    "unet": Step(models.ZOO["unet"], SQUARE, ("plain", "dear memory")),
    "dlrm": Step(models.ZOO["dlrm"], LINE),
    "gshard": Step(models.ZOO["gshard"], SQUARE, ("plain", "dear memory")),
    "GPT-2 medium, 6 layers": Step(functools.partial(architectures.gpt2_medium, layers=6, batch=64), LONG, FEW, H100),
    "Llama-3-8B, 8 layers": Step(_FEW_LAYERS, LINE, MANY, H100),
    "Llama-3-8B, 8 layers, two axes": Step(_FEW_LAYERS, LONG, FEW, H100),
    "Llama-3-8B, 8 layers, run again": Step(_FEW_LAYERS, LONG, FEW[:2], H100, again=True),
    "Mixtral-8x7B, 2 layers": Step(architectures.mixtral_8x7b, LONG, FEW[:1], H100),
    "ViT-L, 6 layers": Step(functools.partial(architectures.vit_large, layers=6), LONG, FEW, H100),
    "ResNet-50": Step(architectures.resnet50, LINE, FEW[:2], H100),
    "U-Net": Step(architectures.unet, LINE, FEW[:2], H100),
}


def planner_of(step: Step) -> Planner:
    """Return the planner of a step."""
    module, inputs = step.build()
    mesh = MeshShape.of(step.mesh)
    defaults = {"cluster": fast_links(), "work_limit": WORK, "time_limit": SECONDS}
    target = Target.of(collect_options("plan", grouped({**defaults, **step.options})), None)
    if step.stage is not None:
        captured = capture_microbatch(module, (), inputs)
        stages = cut(captured, balance_stages(captured, 2), 2)
        planned = StagePlanner([StageTarget(target, mesh)], [{}], None).plan(
            stages, [StageBudget(None, "none", microbatches=4, under_way=2)] * 2
        )
        return planned[step.stage].planner
    call = ModulePlanner(module, mesh, target)
    planner = call.capture(BoundCall.of(module, (), inputs, True)).planner_of(call.target)
    if step.again:
        return recomputing_planner(planner, [layer.name for layer in recomputable(planner.graph)])
    return planner


def recorded(planner: Planner, name: str, plan: CandidatePlan) -> RecordedProblem:
    """Build a problem of a planner as its searches do; `plan` is the one without a limit."""
    builder, axes = planner.builder, frozenset(planner.axes)
    kind: Kind = "plain"
    if name == "plain":
        built = builder.build(axes)
    elif name == "limited":
        built, kind = builder.build(axes, reuse="inputs"), "limited"
        built = replace(built, problem=replace(built.problem, limit=LIMIT * plan.memory.peak))
    elif name == "hidden":
        compute = compute_after(planner.account(plan.decisions))
        built, kind = builder.build(axes, discount=OverlapDiscount("reductions", compute, 0.0)), "hidden"
    else:
        built, kind = _priced(planner, STRENGTHS[name], plan), "priced"
    tied = kind != "limited" and is_large(built.problem)
    tiling = Tiling.of(built.plain, planner.layers) if tied else None
    return RecordedProblem(built.problem, list(built.program_positions), tiling, kind)


def _priced(planner: Planner, strength: float, plan: CandidatePlan) -> BuiltProblem:
    """Build a problem with memory priced; where it counts more than time, parameters are forced to be sharded."""
    constraints = planner.constraints
    if strength > 1.0:
        constraints = replace(constraints, forced=frozenset(forceable_parameters(planner.graph, constraints)))
    prices = memory_prices(peak_weights(plan.held_bytes), strength, plan.cost, plan.memory.peak)
    builder = planner.builder.with_constraints(constraints)
    return builder.build(frozenset(planner.axes), prices=prices, reuse="all")


def solved(recorded: RecordedProblem, *, alone: bool = False) -> SolveResult:
    """Solve a problem as the planner does; `alone`: by the solver without what the planner does before."""
    if alone:
        found = solve(recorded.problem, time_limit=SECONDS, work_limit=WORK)
        return SolveResult(found.assignment, found.cost, found.lower_bound, found.method, found.status)
    options = SolveOptions(
        "auto",
        Budget.of_seconds(SECONDS),
        proof=recorded.kind in ("plain", "limited"),
        priced=recorded.kind == "priced",
        proposal=recorded.kind == "hidden",
        work_limit=WORK,
    )
    # It asks for the problem and the positions alone.
    return solve_problem(recorded, recorded.tiling, options)  # type: ignore[arg-type]


def figures(recorded: RecordedProblem, *, alone: bool = False) -> dict[str, float | str | None]:
    """Solve a problem, and return what was found in how many processor seconds."""
    start = time.process_time()
    result = solved(recorded, alone=alone)
    seconds = time.process_time() - start
    feasible = bool(result.assignment) and recorded.problem.feasible(result.assignment)
    return {
        "cost": result.cost if feasible else None,
        "bound": result.lower_bound if np.isfinite(result.lower_bound) else None,
        "peak": recorded.problem.peak(result.assignment) if feasible else None,
        "seconds": seconds,
        "method": result.method,
    }


def compile_loops() -> None:
    """Have the loops compiled before the first clock starts."""
    problem = ring()
    plain = replace(problem, limit=None)
    for kind in get_args(Kind):
        given = problem if kind == "limited" else plain
        solved(RecordedProblem(given, [float(node) for node in range(given.size)], None, kind))


def write(folder: Path, only: str, table: Table) -> None:
    """Record the problems of all steps, and what is found of them."""
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / "figures.json"
    found = json.loads(listing.read_text("utf-8")) if listing.exists() else {}
    for name, step in STEPS.items():
        if only not in name:
            continue
        planner = planner_of(step)
        plan = planner.solve(planner.constraints)
        problems = {one: recorded(planner, one, plan) for one in step.names}
        save(folder / f"{name}.npz", problems)
        del planner, plan
        for one, problem in problems.items():
            found[f"{name}: {one}"] = figures(problem)
            table.add_row(f"{name}: {one}", *_sizes(problem), *_cells(found[f"{name}: {one}"], None))
            print(f"{name}: {one}", found[f"{name}: {one}"], flush=True)
        listing.write_text(json.dumps(found, indent=1) + "\n", "utf-8")


def compare(folder: Path, only: str, table: Table, *, alone: bool) -> bool:
    """Solve the problems of a folder again; return True if none is solved worse."""
    before = json.loads((folder / "figures.json").read_text("utf-8"))
    worse = []
    for path in sorted(folder.glob("*.npz")):
        if only not in path.stem:
            continue
        for one, problem in load(path).items():
            name = f"{path.stem}: {one}"
            now = figures(problem, alone=alone)
            table.add_row(name, *_sizes(problem), *_cells(now, before.get(name)))
            worse += [name] * bool(name in before and is_worse(now, before[name]))
            print(name, now, "worse" * (name in worse), flush=True)
    return not worse


def is_worse(now: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    """Return True if a cost is higher or a bound is lower by more than a millionth; None is the worst."""
    inf = float("inf")
    costs = [inf if one["cost"] is None else one["cost"] for one in (now, before)]
    bounds = [-inf if one["bound"] is None else one["bound"] for one in (now, before)]
    return costs[0] > costs[1] + 1e-6 * abs(costs[1]) or bounds[0] < bounds[1] - 1e-6 * abs(bounds[1])


def _sizes(recorded: RecordedProblem) -> tuple[str, str, str]:
    return f"{recorded.problem.size:,}", f"{len(recorded.problem.edges):,}", f"{recorded.cells:,}"


def _cells(now: Mapping[str, Any], before: Mapping[str, Any] | None) -> list[str]:
    def said(key: str, text: Callable[[float], str]) -> str:
        values = [one[key] for one in ([now] if before is None else [now, before])]
        return " / ".join("none" if value is None else text(value) for value in dict.fromkeys(values))

    return [
        said("cost", lambda cost: f"{cost:.6g}"),
        said("bound", lambda bound: f"{bound:.6g}"),
        said("peak", lambda peak: f"{peak / 2**20:.2f}"),
        said("seconds", lambda seconds: f"{seconds:.2f}"),
        said("method", str),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("--write", type=Path, metavar="FOLDER")
    folder.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", help="steps whose names hold this text")
    parser.add_argument("--alone", action="store_true", help="compare: the solver alone")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    compile_loops()
    table = Table("", "nodes", "edges", "cells", "cost", "bound", "peak, MiB", "s", "by", title="now / before")
    good = True
    if asked.write:
        write(asked.write, asked.only, table)
    else:
        good = compare(asked.compare, asked.only, table, alone=asked.alone)
    Console(width=200).print(table)
    sys.exit(not good)


if __name__ == "__main__":
    main()
