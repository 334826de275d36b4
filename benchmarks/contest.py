"""Instances of the IOPDDL contest: files, and python benchmarks/contest.py FILE --time-limit 60, which solves one."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.live import Live
from rich.text import Text

from autoshard.solver.incumbent import SolverProgress
from autoshard.solver.problem import Array, Edge, Problem, SolverError
from autoshard.solver.solve import METHODS, Solution, solve

_FORBIDDEN = 10**18
"""Infinity in the files of the contest."""


def load(path: str | Path) -> Problem:
    """Read a problem in the JSON format of the IOPDDL contest, gzipped if the name ends in `.gz`.

    Costs of 10**18 and more become `np.inf`. An optional "components" beside the contest's fields is read too.

    Raises:
        SolverError: the file is no JSON, or fields are missing or do not fit each other.
        OSError: the file can't be read.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(raw)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise SolverError(f"{path} is not a JSON file, or was cut short") from error
    try:
        return _parse_problem(document["problem"])
    except SolverError as error:
        raise SolverError(f"{path}: {error}") from error
    except KeyError as error:
        raise SolverError(f"{path} is not a problem in the contest's format: it lacks {error.args[0]!r}") from error
    except (TypeError, ValueError, IndexError) as error:
        raise SolverError(
            f"{path} is not a problem in the contest's format: a field is of another type, or lists do not fit"
        ) from error


def save(problem: Problem, path: str | Path) -> None:
    """Write a problem in the same format; `load` reads an equal problem back, shared tables included."""
    path = Path(path)
    usages = problem.usages or tuple(np.zeros(len(vector)) for vector in problem.costs)
    body: dict[str, Any] = {
        "name": path.name.split(".")[0],
        "nodes": {
            "intervals": [list(map(int, life)) for life in problem.intervals or ((0, 0),) * problem.size],
            "costs": [_numbers(vector) for vector in problem.costs],
            "usages": [_numbers(usage) for usage in usages],
        },
        "edges": {
            "nodes": [[edge.source, edge.target] for edge in problem.edges],
            "costs": [_numbers(edge.costs.ravel()) for edge in problem.edges],
        },
    }
    if problem.limit is not None:
        body["usage_limit"] = _number(problem.limit)
    if problem.components is not None:
        body["components"] = [labels.tolist() for labels in problem.components]
    text = json.dumps({"problem": body}, separators=(",", ":"), allow_nan=False).encode()
    # A fixed time stamp makes equal problems equal files.
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _parse_problem(body: dict[str, Any]) -> Problem:
    nodes, edges = body["nodes"], body["edges"]
    costs = tuple(_costs(vector) for vector in nodes["costs"])
    limit = body.get("usage_limit")
    components = body.get("components")
    # The format repeats the table of every edge. The solver's caches work on identities, so equal tables become one
    # object.
    shared = _shared_table_reader()
    if len(edges["nodes"]) != len(edges["costs"]):
        raise SolverError(f"{len(edges['nodes'])} edges but {len(edges['costs'])} edge tables")
    return Problem(
        costs=costs,
        edges=tuple(
            Edge(source, target, shared(table, (len(costs[source]), len(costs[target]))))
            for (source, target), table in zip(edges["nodes"], edges["costs"], strict=True)
        ),
        usages=tuple(np.array(usage, dtype=np.float64) for usage in nodes["usages"]),
        intervals=tuple((int(low), int(high)) for low, high in nodes["intervals"]),
        limit=None if limit is None else float(limit),
        components=None if components is None else tuple(np.array(labels, dtype=np.int64) for labels in components),
    )


def _shared_table_reader() -> Callable[[list[float], tuple[int, int]], Array]:
    """Return a reader of edge tables that returns one array for all equal tables."""
    tables: dict[tuple[bytes, tuple[int, int]], Array] = {}

    def read(values: list[float], shape: tuple[int, int]) -> Array:
        table = _costs(values)
        if table.size != shape[0] * shape[1]:
            raise SolverError(f"an edge table has {table.size} entries, its nodes need {shape[0]} x {shape[1]}")
        return tables.setdefault((table.tobytes(), shape), table.reshape(shape))

    return read


def _costs(values: list[float]) -> Array:
    vector = np.array(values, dtype=np.float64)
    # As infinity, forbidden costs survive sums; 10**18 plus 10**18 would be a number like any other.
    vector[vector >= _FORBIDDEN] = np.inf
    return vector


def _numbers(values: Array) -> list[float]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float:
    """Return integers as integers and infinity as `_FORBIDDEN`, as the contest writes them."""
    if np.isinf(value):
        return _FORBIDDEN
    return int(value) if float(value).is_integer() else float(value)


def main(arguments: Sequence[str] | None = None) -> int:
    """Read, solve and report one instance. Ctrl-C ends the search and reports the best assignment so far.

    Returns:
        0 with an assignment, 1 without one, 2 if the file can't be used, 130 if Ctrl-C came before any assignment.
    """
    options = _parser().parse_args(arguments)
    try:
        problem = load(options.file)
        with _display(every=options.verbose) as show:
            solution = solve(
                problem,
                method=options.method,
                time_limit=options.time_limit,
                work_limit=options.work_limit,
                seed=options.seed,
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a problem in the contest's JSON format, gzipped if it ends in .gz")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds (default 60)")
    parser.add_argument("--work-limit", type=int, help="units of work, some 10**8 of them a second (default: no limit)")
    parser.add_argument("--method", default="auto", choices=METHODS, help="how to solve it (default auto)")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers (default 0)")
    parser.add_argument("--verbose", action="store_true", help="a line for every step")
    return parser


@contextmanager
def _display(*, every: bool) -> Iterator[Callable[[SolverProgress], object] | None]:
    """Show a line on standard error that follows the search, if that is a terminal; or a line for every step."""
    console = Console(stderr=True)
    if every or not console.is_terminal:
        yield (lambda moment: sys.stderr.write(f"{_line(moment)}\n")) if every else None
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
