"""Solve an instance of the IOPDDL contest: `python -m autoshard.solver FILE --time-limit 60`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoshard.solver.incumbent import SolverProgress
from autoshard.solver.problem import Problem, SolverError
from autoshard.solver.solve import METHODS, Solution, solve


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, solve and report one instance. Ctrl-C ends the search and reports the best assignment so far.

    Returns:
        0 with an assignment, 1 without one, 2 if the file can't be used, 130 if Ctrl-C came before any assignment.
    """
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO if options.verbose else logging.WARNING, format="%(message)s")
    try:
        problem = Problem.load(options.file)
        with _display(hidden=options.verbose) as show:
            solution = solve(
                problem,
                method=options.method,
                time_limit=options.time_limit,
                work_limit=options.work_limit,
                seed=options.seed,
                verbose=options.verbose,
                progress=show,
            )
    except (SolverError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("interrupted before any feasible assignment was known\n")
        return 130
    sys.stdout.write(_report(problem, solution))
    return 0 if solution.assignment or not problem.size else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m autoshard.solver", description=__doc__)
    parser.add_argument("file", help="a problem in the contest's JSON format, gzipped if it ends in .gz")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--work-limit", type=int, help="units of work, some 10**8 of them a second (default: no limit)")
    parser.add_argument("--method", default="auto", choices=METHODS, help="how to solve it (default auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    parser.add_argument("--verbose", action="store_true", help="log progress")
    return parser


@contextmanager
def _display(*, hidden: bool) -> Iterator[Callable[[SolverProgress], None] | None]:
    """Show a line on standard error that follows the search, if that is a terminal."""
    console = Console(stderr=True)
    if hidden or not console.is_terminal:
        yield None
        return
    with Live(Text("presolve"), console=console, transient=True, refresh_per_second=4) as live:
        yield lambda moment: live.update(Text(_line(moment), no_wrap=True, overflow="ellipsis"))


def _line(moment: SolverProgress) -> str:
    return f"{moment.seconds:7.1f} s  cost {moment.cost:.9g}  bound {moment.lower_bound:.9g}  {moment.phase}"


def _report(problem: Problem, solution: Solution) -> str:
    limit = "none" if problem.limit is None else f"{problem.limit:.12g}"
    status = f"{solution.status}, interrupted" if solution.interrupted else solution.status
    return (
        f"status {status}\n"
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
