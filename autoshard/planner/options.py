"""The strategies of one operator as tables: specs interned, work priced, made once per distinct rule."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from autoshard.cluster.cost import CostModel
from autoshard.cluster.flops import flops
from autoshard.patterns.rule import OpCall, Rule
from autoshard.patterns.strategy import (
    Choices,
    axis_choices,
    fits,
    local_shape,
    operand_spec,
    result_spec,
    share,
)
from autoshard.patterns.variants import resolved
from autoshard.specs.spec import Spec

_COLLECTIVES = {"gather_of_each": "all_gather"}


@dataclass(frozen=True, eq=False)
class SpecList:
    """The specs of one tensor under every strategy of its operator, each distinct spec stored once."""

    distinct: tuple[Spec, ...]
    index: np.ndarray

    @staticmethod
    def of(specs: Sequence[Spec]) -> SpecList:
        positions: dict[Spec, int] = {}
        index = np.array([positions.setdefault(spec, len(positions)) for spec in specs], dtype=np.intp)
        return SpecList(tuple(positions), index)

    def __getitem__(self, strategy: int) -> Spec:
        return self.distinct[self.index[strategy]]


@dataclass(frozen=True, eq=False)
class Options:
    """All strategies of an operator: choices, and the specs of operands and results that follow."""

    choices: tuple[Choices, ...]
    operands: tuple[SpecList, ...]
    results: tuple[SpecList, ...]


class OptionTables:
    """Makes `Options` and their prices, once for every distinct rule and call."""

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self.mesh = cost.mesh
        self._options: dict[tuple[int, tuple[int | None, ...] | None], Options] = {}
        self._seconds: dict[tuple[int, int, int], np.ndarray] = {}
        self._kept: list[object] = []  # objects whose identity is a key above

    def options(self, rule: Rule, fixed: tuple[int | None, ...] | None = None) -> Options:
        """The strategies of a rule; on axes where `fixed` holds a choice, only that one."""
        key = (id(rule), fixed)
        if key not in self._options:
            self._kept.append(rule)
            self._options[key] = self._make(rule, fixed)
        return self._options[key]

    def _make(self, rule: Rule, fixed: tuple[int | None, ...] | None) -> Options:
        per_axis = [axis_choices(rule, size) for size in self.mesh.sizes]
        if fixed is not None:
            per_axis = [every if one is None else (one,) for every, one in zip(per_axis, fixed, strict=True)]
        choices = tuple(choice for choice in itertools.product(*per_axis) if fits(rule, choice, self.mesh))
        mesh = self.mesh
        return Options(
            choices,
            tuple(
                SpecList.of([operand_spec(rule, choice, mesh, operand) for choice in choices])
                for operand in range(len(rule.operands))
            ),
            tuple(
                SpecList.of([result_spec(rule, choice, mesh, result) for choice in choices])
                for result in range(len(rule.results))
            ),
        )

    def seconds(self, call: OpCall, rule: Rule, options: Options) -> np.ndarray:
        """Seconds of compute, and of the collectives inside the local program, of every strategy."""
        key = (id(call), id(rule), id(options))
        if key not in self._seconds:
            self._kept += [call, options]
            self._seconds[key] = np.array([self.strategy_seconds(call, rule, choice) for choice in options.choices])
        return self._seconds[key]

    def strategy_seconds(self, call: OpCall, rule: Rule, choices: Choices) -> float:
        """Seconds of compute and of inner collectives of one strategy."""
        inner = sum(self.cost.collective(kind, bytes, axis) for kind, axis, bytes in self.exchanges(rule, choices))
        return inner + self.compute_seconds(call, rule, choices)

    def compute_seconds(self, call: OpCall, rule: Rule, choices: Choices) -> float:
        """Seconds that one rank computes: its share of the work, or the time to move its bytes."""
        rule, choices = resolved(rule, choices)
        if rule.free:
            return 0.0
        results = [meta for meta in call.results if meta is not None]
        work = flops(call.op, [m.shape for m in call.operands], [m.shape for m in results], call.args)
        moved = 0
        for dims, meta in (
            *zip(rule.operands, call.operands, strict=True),
            *zip(rule.results, call.results, strict=True),
        ):
            if dims is not None and meta is not None:
                moved += math.prod(local_shape(rule, dims, choices, self.mesh, meta.shape)) * meta.dtype.itemsize
        return self.cost.compute(
            work / share(rule, choices, self.mesh), moved, results[0].dtype if results else torch.float32
        )

    def exchanges(self, rule: Rule, choices: Choices) -> list[tuple[str, int, int]]:
        """Collectives inside the local program: (kind, axis, bytes that a rank holds before)."""
        rule, choices = resolved(rule, choices)
        whole = share(rule, choices, self.mesh)
        found = []
        for axis, choice in enumerate(choices):
            for kind, bytes in rule.factors[choice].exchanges if choice >= 0 else ():
                size = self.mesh.sizes[axis]
                parts = whole if kind in ("all_gather", "all_to_all", "broadcast") else whole / size
                turns = size if kind == "broadcast" else 1  # every rank sends its part in turn
                found += [(_COLLECTIVES.get(kind, kind), axis, math.ceil(bytes / parts))] * turns
        return found

    def restricted(self, rule: Rule, current: Choices, free: frozenset[int]) -> Options:
        """Strategies that differ from `current` on the `free` axes only."""
        return self.options(rule, tuple(None if axis in free else one for axis, one in enumerate(current)))
