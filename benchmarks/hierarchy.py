"""The hierarchy beside the full search: python benchmarks/hierarchy.py [--model NAME ...] [--mesh 8 8x8] [--layers N]

As Rhino's Table 5 and Fig. 10: for every model and mesh of H100s the nodes of its problem, the share of them that are
critical, and CPU seconds and cost of three ways to solve it. "segments": `solve_in_segments` on the whole problem,
layers untied. "fast" and "full": what `effort=` chooses (Rhino's O2 and O3), which both solve problems exactly where
that is quick, tie equal layers and pass messages before anything else. Costs are relative to that of "full", whose gap
says how far from the optimum it may be. A process has one thread that works; what numba compiles is compiled before.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from typing import Any

import architectures
from architectures import Example
from rich.console import Console
from rich.table import Table

from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.options.target import Settings
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import BuiltProblem, Constraints
from autoshard.planner.solving import SolveOptions, SolveResult, is_large, solve_by_messages, solve_problem
from autoshard.planner.tiling import Tiling
from autoshard.solver.hierarchy import HierarchySolution, solve_in_segments
from autoshard.solver.reduced_problem import ReducedProblem
from autoshard.solver.solver_budget import Budget
from autoshard.specs.axes import MeshShape

MESHES = {"8": {"x": 8}, "8x8": {"dp": 8, "tp": 8}}
DEPTHS: dict[str, tuple[Callable[..., Example], int | None]] = {
    "GPT-2 medium": (architectures.gpt2_medium, 24),
    "Llama-3-8B": (architectures.llama3_8b, 32),
    "ViT-L": (architectures.vit_large, 24),
    "Mixtral-8x7B, cut": (architectures.mixtral_8x7b, 8),
    "Wide-ResNet-50": (architectures.wide_resnet, None),
    "U-Net": (architectures.unet, None),
}
"""How each model is made, and its layers; None where its depth is not in layers."""


def problems(model: str, layers: int | None, meshes: list[str]) -> Iterator[tuple[str, BuiltProblem, Tiling | None]]:
    """The problem of a model on each mesh, and its equal layers where the planner would tie them."""
    build, depth = DEPTHS[model]
    module, kwargs = build() if depth is None else build(layers or depth)
    graph = capture(module, (), kwargs, grad=True)
    for mesh in meshes:
        shape = MeshShape.of(MESHES[mesh])
        planner = Planner(graph, shape, Cluster.of("h100"), Constraints(), Settings())
        built = planner.builder.build(frozenset(range(len(shape.sizes))))
        yield mesh, built, Tiling.of(built, planner.layers) if is_large(built.problem) else None


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def row(built: BuiltProblem, tiling: Tiling | None, time_limit: float) -> list[str]:
    """What the table says of one problem, from its number of nodes on."""

    def by(effort: str) -> SolveResult:
        search = SolveOptions("auto", Budget.of_seconds(time_limit), fast=effort == "fast")
        return solve_problem(built, tiling, search)

    segments, alone = timed(lambda: solve_in_segments(built.problem, built.program_positions))
    fast, quick = timed(lambda: by("fast"))
    full, long = timed(lambda: by("full"))
    return [
        str(built.problem.size),
        f"{segments.critical / built.problem.size:.1%}",
        str(segments.segments),
        f"{alone:.2f}",
        relative(segments, full),
        f"{quick:.2f}",
        relative(fast, full),
        fast.method,
        f"{long:.2f}",
        f"{full.cost:.6f}",
        f"{full.gap:.2%}",
        f"{long / quick:.1f}",
    ]


def relative(found: SolveResult | HierarchySolution, full: SolveResult) -> str:
    return f"{found.cost / full.cost:.4f}" if found.assignment else "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=DEPTHS, nargs="+", default=list(DEPTHS))
    parser.add_argument("--mesh", choices=MESHES, nargs="+", default=list(MESHES))
    parser.add_argument("--layers", type=int, help="default: the model's")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds for one search")
    args = parser.parse_args()

    headings = ["model", "mesh", "nodes", "critical", "segments"]
    headings += ["segments, s", "cost", "fast, s", "cost", "fast, found by", "full, s", "full, cost", "gap", "s / s"]
    table = Table(*headings, title="full = 1; s / s: seconds of full over those of fast")
    console = Console(width=160)
    for model in args.model:
        for number, (mesh, built, tiling) in enumerate(problems(model, args.layers, args.mesh)):
            if not table.rows:
                whole = ReducedProblem.of(built.problem, built.program_positions)
                solve_by_messages(whole, whole, SolveOptions("auto", Budget()))  # compiles what messages need
            table.add_row(
                model if number == 0 else "", f"({', '.join(mesh.split('x'))})", *row(built, tiling, args.time_limit)
            )
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
