"""Problems as files: the JSON format of the public IOPDDL contest."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.solver.problem import Array, Edge, Problem, SolverError

FORBIDDEN = 10**18
"""The contest's infinity."""


def load_problem(path: str | Path) -> Problem:
    """Reads a problem.

    Args:
        path: a contest file; gzipped if the name ends in `.gz`. Costs of 10**18 and more become `np.inf`. An
            optional "components" beside the contest's fields is read too.

    Raises:
        SolverError: the file is no JSON, or fields are missing or do not fit each other.
        OSError: the file can't be read.
    """
    path = Path(path)
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        document = json.loads(raw)
    except (ValueError, EOFError, gzip.BadGzipFile) as error:
        raise SolverError(f"{path} is not a JSON file, or was cut short: {error}") from error
    try:
        return _parse_problem(document["problem"])
    except SolverError as error:
        raise SolverError(f"{path}: {error}") from error
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise SolverError(f"{path} is not a problem in the contest's format: {error!r}") from error


def save_problem(problem: Problem, path: str | Path) -> None:
    """Writes a problem; `load_problem` reads the same problem back, shared tables included."""
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
    # A fixed time stamp: the same problem is the same file.
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)


def _parse_problem(body: dict[str, Any]) -> Problem:
    nodes, edges = body["nodes"], body["edges"]
    costs = tuple(_costs(vector) for vector in nodes["costs"])
    limit = body.get("usage_limit")
    components = body.get("components")
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
    """A reader of edge tables that returns one array for all equal tables."""
    known: dict[tuple[bytes, tuple[int, int]], Array] = {}

    def read(values: list[float], shape: tuple[int, int]) -> Array:
        table = _costs(values)
        if table.size != shape[0] * shape[1]:
            raise SolverError(f"an edge table has {table.size} entries, its nodes need {shape[0]} x {shape[1]}")
        return known.setdefault((table.tobytes(), shape), table.reshape(shape))

    return read


def _costs(values: list[float]) -> Array:
    vector = np.array(values, dtype=np.float64)
    vector[vector >= FORBIDDEN] = np.inf
    return vector


def _numbers(values: Array) -> list[float]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float:
    """Integers as integers, as the contest has them, and its infinity."""
    if np.isinf(value):
        return FORBIDDEN
    return int(value) if float(value).is_integer() else float(value)
