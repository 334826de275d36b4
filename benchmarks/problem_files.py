"""Problems of the planner as files, which a solver reads without capturing a model.

A file is a numpy archive with several problems of one step: at several prices of memory, say. Vectors and tables stand
in it once, however many nodes, edges and problems share them; what was one object is one object again, since solvers
look at an object once. A weighted sum of tables stays one: its parts are stored, not the sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from autoshard.planner.tiling import Tiling
from autoshard.solver import Edge, Problem
from autoshard.solver.problem import Blend

Kind = Literal["plain", "limited", "priced", "hidden"]
Arrays = Mapping[str, npt.NDArray[np.generic]]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedProblem:
    """A problem, and what the planner tells its solver besides.

    Attributes:
        problem: the problem.
        program_positions: of every node in the order of the program.
        tiling: the repeated layers; None if there are none.
        kind: `"plain"`; `"limited"`: with a limit of memory; `"priced"`: with prices of memory in its costs;
            `"hidden"`: with a discount on collectives that compute hides.
    """

    problem: Problem
    program_positions: list[float]
    tiling: Tiling | None
    kind: Kind

    @property
    def cells(self) -> int:
        """Entries of all edge tables."""
        return sum(edge.shape[0] * edge.shape[1] for edge in self.problem.edges)


def save(path: Path, problems: Mapping[str, RecordedProblem]) -> None:
    """Write problems to one file, by their names."""
    pools = {"vectors": _Pool(), "tables": _Pool(), "labels": _Pool(), "blends": _Pool()}
    arrays = {}
    for name, recorded in problems.items():
        numbered = _numbered(recorded, pools)
        arrays |= {f"{name}/{key}": value for key, value in numbered.items()}
    arrays["names"] = np.array(list(problems))
    blends = pools.pop("blends")
    arrays["blends"] = np.concatenate([np.zeros((0, 3)), *blends.members])
    for name, pool in pools.items():
        arrays |= pool.packed(name)
    np.savez_compressed(path, **arrays)


def load(path: Path) -> dict[str, RecordedProblem]:
    """Read the problems of a file, by their names."""
    with np.load(path, allow_pickle=False) as archive:
        arrays = dict(archive)
    pools = {name: _unpacked(arrays, name) for name in ("vectors", "tables", "labels")}
    numbers = arrays["blends"][:, 0].astype(int)
    parts = [arrays["blends"][numbers == number] for number in range(int(numbers.max(initial=-1)) + 1)]
    blends = [Blend(tuple((float(factor), pools["tables"][int(table)]) for _, factor, table in rows)) for rows in parts]
    return {str(name): _recorded(str(name), arrays, pools, blends) for name in arrays["names"]}


class _Pool:
    """Objects that are stored once: by their identity, they have numbers."""

    def __init__(self) -> None:
        self.members: list[npt.NDArray[np.generic]] = []
        self._numbers: dict[int, tuple[int, object]] = {}  # the object is kept, so that its identity stays its own

    def number(self, holder: object, member: npt.NDArray[np.generic] | None = None) -> int:
        """Return the number of an object, whose content is `member`, or the object itself."""
        if id(holder) not in self._numbers:
            self._numbers[id(holder)] = len(self.members), holder
            self.members.append(holder if member is None else member)
        return self._numbers[id(holder)][0]

    def packed(self, name: str) -> dict[str, npt.NDArray[np.generic]]:
        """Return all members as one array, and their shapes."""
        values = np.concatenate([member.ravel() for member in self.members]) if self.members else np.zeros(0)
        return {name: values, f"{name} shapes": np.array([member.shape for member in self.members], dtype=np.int64)}


def _unpacked(arrays: Arrays, name: str) -> list[npt.NDArray[np.generic]]:
    shapes = arrays[f"{name} shapes"]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes], dtype=np.int64)
    pieces = np.split(arrays[name], ends[:-1]) if len(ends) else []
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _numbered(recorded: RecordedProblem, pools: Mapping[str, _Pool]) -> dict[str, npt.NDArray[np.generic]]:
    """Return a problem as arrays of numbers of vectors, labels, tables and blends."""
    problem, vectors, tables, blends = recorded.problem, pools["vectors"], pools["tables"], pools["blends"]
    rows = []
    for edge in problem.edges:
        if isinstance(edge.table, Blend):
            known = len(blends.members)
            parts = [(known, factor, tables.number(table)) for factor, table in edge.parts]
            rows.append((edge.source, edge.target, 1, blends.number(edge.table, np.array(parts))))
        else:
            rows.append((edge.source, edge.target, 0, tables.number(edge.table)))
    arrays: dict[str, npt.NDArray[np.generic]] = {
        "costs": np.array([vectors.number(vector) for vector in problem.costs], dtype=np.int64),
        "edges": np.array(rows, dtype=np.int64).reshape(-1, 4),
        "positions": np.array(recorded.program_positions),
        "kind": np.array(get_args(Kind).index(recorded.kind)),
    }
    if problem.usages is not None and problem.intervals is not None:
        arrays["usages"] = np.array([vectors.number(usage) for usage in problem.usages], dtype=np.int64)
        arrays["intervals"] = np.array(problem.intervals, dtype=np.int64).reshape(-1, 2)
    if problem.limit is not None:
        arrays["limit"] = np.array(problem.limit)
    if problem.components is not None:
        labels = pools["labels"]
        arrays["components"] = np.array([labels.number(one) for one in problem.components], dtype=np.int64)
    if recorded.tiling is not None:
        arrays["leaders"] = np.array(recorded.tiling.leaders, dtype=np.int64)
        arrays["follows"] = np.array(recorded.tiling.follows, dtype=np.int64)
    return arrays


def _recorded(
    name: str, arrays: Arrays, pools: Mapping[str, list[npt.NDArray[np.generic]]], blends: list[Blend]
) -> RecordedProblem:
    own = {key.removeprefix(f"{name}/"): value for key, value in arrays.items() if key.startswith(f"{name}/")}
    vectors, tables, labels = pools["vectors"], pools["tables"], pools["labels"]
    edges = tuple(
        Edge(source, target, blends[number] if blended else tables[number])
        for source, target, blended, number in own["edges"].tolist()
    )
    problem = Problem(
        costs=tuple(vectors[number] for number in own["costs"]),
        edges=edges,
        usages=tuple(vectors[number] for number in own["usages"]) if "usages" in own else None,
        intervals=tuple((low, high) for low, high in own["intervals"].tolist()) if "intervals" in own else None,
        limit=float(own["limit"]) if "limit" in own else None,
        components=tuple(labels[number] for number in own["components"]) if "components" in own else None,
    )
    tiling = Tiling(tuple(own["leaders"].tolist()), tuple(own["follows"].tolist())) if "leaders" in own else None
    return RecordedProblem(problem, own["positions"].tolist(), tiling, get_args(Kind)[int(own["kind"])])
