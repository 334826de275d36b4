"""The solver on instances of the IOPDDL contest: python benchmarks/solver.py FOLDER_OR_FILE ... --instances G M

For each instance: nodes, edges, processor seconds, cost, lower bound, gap and whether it is proved, beside what the
contest's winner and the best publication reached. Each is solved for 20 seconds unless told otherwise; `--time-limit 0`
gives each what the contest allowed. The loops are compiled before the first clock starts.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import numpy as np
from contest import load
from rich.console import Console
from rich.table import Table

from autoshard.solver import Edge, Problem, Solution, solve
from autoshard.solver.flat.large_solver import LargeSolver
from autoshard.solver.incumbent import Incumbent
from autoshard.solver.solver_budget import Budget

_PREFIX = "asplos-2025-iopddl-"


@dataclass(frozen=True, slots=True)
class Published:
    """Of an instance: the seconds that the contest allowed, the winner's cost on eight cores, the best cost known."""

    seconds: float
    winner: float
    best: float


PUBLISHED = {
    "asplos-2025-iopddl-G": Published(120, 217_039, 217_039),
    "asplos-2025-iopddl-A": Published(60, 6_569_457_676, 6_548_641_531),
    "asplos-2025-iopddl-M": Published(180, 49_928_460_991, 49_928_157_500),
    "asplos-2025-iopddl-S": Published(240, 1_534_613_444, 1_511_377_982),
}
"""Results of the ASPLOS 2025 / EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl), and of
later publications on its instances."""


def instances(paths: list[Path]) -> list[Path]:
    """The files named, and those in the folders named."""
    found: list[Path] = []
    for path in paths:
        found += sorted([*path.glob("*.json"), *path.glob("*.json.gz")]) if path.is_dir() else [path]
    return found


def row(path: Path, problem: Problem, solution: Solution, seconds: float) -> list[str]:
    """One line of the table: an instance, and how it was solved in so many processor seconds."""
    known = PUBLISHED.get(_name(path))
    compared = [known.winner, known.best] if known else []
    beside = [text for cost in compared for text in (f"{cost:,.0f}", f"{solution.cost / cost - 1:+.4%}")]
    return [
        _name(path).removeprefix(_PREFIX),
        f"{problem.size:,}",
        f"{len(problem.edges):,}",
        f"{seconds:.0f}",
        f"{solution.cost:,.0f}",
        f"{solution.lower_bound:,.0f}",
        f"{solution.gap:.4%}",
        "yes" if solution.status == "optimal" else "no",
        *(beside or [""] * 4),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, help="instances, or folders of them")
    parser.add_argument("--instances", nargs="+", help="names of those to solve, G or A say (default: all)")
    parser.add_argument("--time-limit", type=float, default=20.0, help="seconds (default 20); 0: the contest's")
    parser.add_argument("--work-limit", type=int, help="units of work (default: no limit)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    LargeSolver(ring(), Incumbent(Budget())).run()  # compiles the loops
    titles = ("", "nodes", "edges", "s", "cost", "lower bound", "gap", "proved")
    table = Table(*titles, "winner", "ours", "best published", "ours", title="ours: cost above theirs")
    for path in instances(args.paths):
        if args.instances and _name(path).removeprefix(_PREFIX) not in args.instances:
            continue
        problem = load(path)
        known = PUBLISHED.get(_name(path))
        seconds = args.time_limit or (known.seconds if known else 60.0)
        began = process_time()
        solution = solve(problem, time_limit=seconds, work_limit=args.work_limit, seed=args.seed)
        table.add_row(*row(path, problem, solution, process_time() - began))
    Console(width=170).print(table)


def _name(path: Path) -> str:
    return path.name.split(".")[0]


def ring() -> Problem:
    """Return a problem that needs every loop: five nodes in a ring under a limit that binds."""
    random = np.random.default_rng(0)
    costs = tuple(random.random((5, 3)))
    edges = tuple(Edge(node, (node + step) % 5, random.random((3, 3))) for node in range(5) for step in (1, 2))
    usages = tuple(random.integers(1, 9, (5, 3)).astype(float))
    return Problem(costs, edges, usages, ((0, 9),) * 5, 15.0)


if __name__ == "__main__":
    main()
