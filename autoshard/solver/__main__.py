"""Solves an instance of the IOPDDL contest: `python -m autoshard.solver FILE --time-limit 60`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from autoshard.solver.problem import Problem, SolverError
from autoshard.solver.solve import Solution, solve


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads, solves and reports one instance.

    Returns:
        0 with an assignment, 1 where there is or was found none, 2 where the file can't be used.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        problem = Problem.load(options.file)
        solution = solve(
            problem,
            method=options.method,
            time_limit=options.time_limit,
            seed=options.seed,
            verbose=options.verbose,
        )
    except (SolverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(_report(problem, solution))
    return 0 if solution.assignment else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m autoshard.solver", description=__doc__)
    parser.add_argument("file", help="a problem in the contest's JSON format, gzipped if it ends in .gz")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--method", default="auto", help="auto, eliminate, alternate or ilp (default auto)")
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default 0)")
    parser.add_argument("--verbose", action="store_true", help="log progress")
    return parser


def _report(problem: Problem, solution: Solution) -> str:
    limit = "none" if problem.limit is None else f"{problem.limit:.12g}"
    return (
        f"status {solution.status}\n"
        f"method {solution.method}\n"
        f"seconds {solution.seconds:.2f}\n"
        f"cost {solution.cost:.15g}\n"
        f"lower bound {solution.lower_bound:.15g}\n"
        f"gap {solution.gap:.3g}\n"
        f"peak {solution.peak:.15g}\n"
        f"limit {limit}\n"
        f"[{', '.join(map(str, solution.assignment))}]\n"
    )


if __name__ == "__main__":
    sys.exit(main())
