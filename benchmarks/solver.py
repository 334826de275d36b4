"""The solver on instances of the IOPDDL contest: python benchmarks/solver.py FOLDER_OR_FILE ... --time-limit 60

For each instance: nodes, edges, seconds, cost, lower bound and gap, beside what the contest's winner and the best
publication reached. Each is solved for as long as the contest allowed, unless told otherwise.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoshard.solver import Problem, Solution, solve


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


def row(path: Path, problem: Problem, solution: Solution) -> list[str]:
    """One line of the table."""
    name = path.name.split(".")[0]
    known = PUBLISHED.get(name)
    return [
        name.removeprefix("asplos-2025-iopddl-"),
        f"{problem.size:,}",
        f"{len(problem.edges):,}",
        f"{solution.seconds:.0f}",
        f"{solution.cost:,.0f}",
        f"{solution.lower_bound:,.0f}",
        f"{solution.gap:.4%}",
        f"{known.winner:,.0f}" if known else "",
        f"{solution.cost / known.winner:.6f}" if known else "",
        f"{known.best:,.0f}" if known else "",
        f"{solution.cost / known.best:.6f}" if known else "",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=Path, help="instances, or folders of them")
    parser.add_argument("--time-limit", type=float, help="seconds (default: the contest's, 60 where there is none)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    table = Table("", "nodes", "edges", "s", "cost", "lower bound", "gap", "winner", "ratio", "best published", "ratio")
    for path in instances(args.paths):
        problem = Problem.load(path)
        known = PUBLISHED.get(path.name.split(".")[0])
        seconds = args.time_limit or (known.seconds if known else 60.0)
        table.add_row(*row(path, problem, solve(problem, time_limit=seconds, seed=args.seed)))
    Console(width=170).print(table)


if __name__ == "__main__":
    main()
