"""Our plans on one device beside Checkmate's optimum: python benchmarks/checkmate.py [--model NAME] [--limits 4]

Five small models, captured and planned on a mesh of one device, where recomputation is all that can keep a limit. Their
operators, with our seconds and bytes, are a graph for the integer program of Checkmate, which OR-Tools solves: the
least seconds of operators that run again, such that every stage keeps the limit. Views belong to the operator whose
memory they are, and an operator holds what its plan's account has besides while it runs. Both are asked at the same
limits, from the smallest peak that the planner finds to the peak without recomputation.

A row has the seconds that each adds to a step that runs nothing again, in percent of it, and what is proved of the
program. `held` says how far apart the two accounts are before anything runs again.

Source: Jain et al., Checkmate: Breaking the Memory Wall with Optimal Tensor Rematerialization, MLSys 2020, section 4.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from architectures import Example
from gpt import GPT, Shape
from limits import Planning, limits_between
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from autoshard.capture.joint import capture
from autoshard.capture.nodes import is_view
from autoshard.capture.recomputation import Recomputable, recomputable
from autoshard.memory.footprint import Memory
from autoshard.options import Search
from autoshard.planner.planner import Planner
from autoshard.program.aliasing import storage_root
from autoshard.solver.linear import LinearProgram, minimise
from autoshard.specs.axes import MeshShape

MESH = {"x": 1}


@dataclass(frozen=True, slots=True)
class Operator:
    """A node of Checkmate's graph; nodes are numbered in the order in which they run first.

    Attributes:
        seconds: of one run.
        bytes: of its results, which are held while they are kept.
        reads: the nodes whose results it reads.
        returned: True if a result is held to the end, once it is made.
        working: bytes that are held besides while it runs.
    """

    seconds: float
    bytes: int
    reads: tuple[int, ...]
    returned: bool = False
    working: int = 0


def planning_of(module: nn.Module, inputs: dict[str, Tensor], cluster: str) -> Planning:
    """Return the planning of a step on one device."""
    options = {"cluster": cluster, "optimizer": "sgd", "search": Search(time_limit=600.0)}
    return Planning(module, capture(module, (), inputs, grad=True), MeshShape.of(MESH), options)


@dataclass(frozen=True, slots=True)
class StepGraph:
    """A step on one device as a graph.

    Attributes:
        operators: the nodes of Checkmate's graph.
        number: that of the operator that a node of the step belongs to.
        border: the first operator of the backward half.
    """

    operators: list[Operator]
    number: dict[torch.fx.Node, int]
    border: int

    def schedule_of(self, layers: Sequence[Recomputable]) -> list[tuple[int, ...]]:
        """Return the schedule in which layers run again, each before the first later operator that reads of it."""
        stages = [[stage] for stage in range(len(self.operators))]
        for layer in layers:
            # A view of a parameter has no number.
            again, freed = (
                {self.number[node] for node in nodes if node in self.number} for nodes in (layer.rerun, layer.freed)
            )
            backward = range(self.border, len(self.operators))
            stages[next(at for at in backward if freed & {*self.operators[at].reads})] += again
        return [tuple(sorted(set(stage))) for stage in stages]


def graph_of(planner: Planner) -> StepGraph:
    """Return the graph of a step on one device, at the prices of its planner, and with the temporaries of its plan."""
    plan = planner.solve(planner.constraints)
    graph, account = planner.graph, planner.account(plan.decisions)
    number: dict[torch.fx.Node, int] = {}
    places: list[int] = []  # of every node in the program
    seconds: list[float] = []
    held: list[int] = []
    reads: list[set[int]] = []
    for place, node in enumerate(planner.rules.operators):
        operands = [number[operand] for operand in node.all_input_nodes if operand in number]
        owner = storage_root(node)
        if (is_view(node) or owner is not node) and operands:
            # A view of an input belongs to no operator.
            number[node] = number.get(owner, operands[0])
            seconds[number[node]] += account.seconds(node)
            reads[number[node]] |= {operand for operand in operands if operand < number[node]}
        elif not is_view(node):
            number[node] = len(seconds)
            places.append(place)
            seconds.append(account.seconds(node))
            held.append(_bytes(node))
            reads.append(set(operands))
    kept = [*graph.gradients.values(), *graph.tensor_outputs.values()]
    returned = {number[node] for node in kept if node in number}
    parts = enumerate(zip(seconds, held, reads, strict=True))
    plain = [Operator(time, bytes, tuple(sorted(used)), place in returned) for place, (time, bytes, used) in parts]
    # What the plan's account has besides is there while the operator runs: the temporaries of its local program.
    live = Checkmate(plain).held([(stage,) for stage in range(len(plain))])
    rest = at_rest(plan.memory)
    operators = [
        replace(one, working=max(0, int(plan.held_bytes[place]) - rest - known))
        for one, place, known in zip(plain, places, live, strict=True)
    ]
    phases = [graph.phase(planner.rules.operators[place]) for place in places]
    return StepGraph(operators, number, phases.index("backward"))


def _bytes(node: torch.fx.Node) -> int:
    values = node.meta["val"] if isinstance(node.meta["val"], (tuple, list)) else [node.meta["val"]]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


@dataclass(frozen=True, slots=True)
class Optimum:
    """The least seconds of operators that run again within a limit, and the bound that is proved; None: no schedule."""

    seconds: float | None
    bound: float
    schedule: tuple[tuple[int, ...], ...] = ()

    @property
    def proved(self) -> bool:
        return self.seconds is not None and self.seconds - self.bound <= 1e-6 * self.seconds


class Checkmate:
    """The integer program of a graph.

    Stage t runs node t for the first time (frontier-advancing stages, 4.6 there). R[t, i]: node i runs in stage t.
    S[t, i]: its result is kept from stage t - 1 for stage t. FREE[t, i, k]: its memory is given back after node k.

    Args:
        operators: the graph.
    """

    def __init__(self, operators: Sequence[Operator]) -> None:
        self.operators = operators
        self.total = sum(one.seconds for one in operators)
        self.users: list[list[int]] = [[] for _ in operators]
        for number, one in enumerate(operators):
            for read in one.reads:
                self.users[read].append(number)

    @cached_property
    def plain_peak(self) -> int:
        """Bytes of the peak if nothing runs again, and what is no longer read is given back."""
        return max(self.held([(stage,) for stage in range(len(self.operators))]))

    def held(self, schedule: Sequence[Sequence[int]]) -> Iterator[int]:
        """Yield the bytes held at every run of a schedule that keeps what is read before it runs again."""
        runs = [number for stage in schedule for number in stage]
        for place, number in enumerate(runs):
            live = {number} | {one for one in set(runs[:place]) if self._is_live(runs, place, one)}
            yield sum(self.operators[one].bytes for one in live) + self.operators[number].working

    def _is_live(self, runs: Sequence[int], place: int, one: int) -> bool:
        """Return True if a result that was made is read from a place on before it is made again."""
        for later in runs[place:]:
            if one in self.operators[later].reads:
                return True
            if later == one:
                return False
        return self.operators[one].returned

    def solve(self, limit: int, seconds: float, start: Sequence[Sequence[int]] | None = None) -> Optimum:
        """Solve the program for a limit of the bytes of results; a schedule to start from may exceed the limit."""
        if limit < max((one.bytes + one.working for one in self.operators), default=0):
            return Optimum(None, math.inf)
        stages = _Stages(self, limit)
        hint = stages.values_of(start) if start is not None and max(self.held(start)) <= limit else None
        found = minimise(stages.program, time_limit=seconds, hint=hint)
        if found.values is None:
            return Optimum(None, math.inf if found.infeasible else max(0.0, found.bound) * self.total)
        schedule = stages.schedule(found.values)
        again = sum(self.operators[i].seconds for t, stage in enumerate(schedule) for i in stage if i < t)
        return Optimum(again, max(0.0, min(found.bound * self.total, again)), schedule)


class _Stages:
    """The rows of a program at a limit; costs are parts of all seconds, bytes are parts of the limit.

    Only R is told to be whole numbers: with whole R, the rest is whole in a best solution, or can be rounded to one.
    """

    def __init__(self, checkmate: Checkmate, limit: int) -> None:
        self.operators, self.users = checkmate.operators, checkmate.users
        self.bytes = [one.bytes / limit for one in self.operators]
        self.working = [one.working / limit for one in self.operators]
        self.program = LinearProgram()
        stages = range(len(self.operators))
        costs = [one.seconds / checkmate.total for one in self.operators]
        self.run = {(t, i): self._add(costs[i] * (i < t), integer=i < t) for t in stages for i in range(t + 1)}
        self.keep = {(t, i): self._add() for t in stages for i in range(t)}
        self.used: dict[tuple[int, int], int] = {}  # the bytes in use when node k runs in stage t
        self.free: dict[tuple[int, int, int], int] = {}
        for t in stages:
            self.program.lower[self.run[t, t]] = 1.0
            self._keep_order(t)
            self._keep_limit(t)

    def schedule(self, values: Sequence[float]) -> tuple[tuple[int, ...], ...]:
        """Return the nodes that run in every stage, in their order."""
        stages = range(len(self.operators))
        return tuple(tuple(i for i in range(t + 1) if values[self.run[t, i]] > 0.5) for t in stages)

    def values_of(self, schedule: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the values of all variables for a schedule that keeps what is read before it runs again."""
        values = np.zeros(len(self.program.costs))
        stages = range(len(self.operators))
        runs = [set(stage) for stage in schedule]
        for i in stages:
            needed = self.operators[i].returned
            for t in reversed(range(i + 1, len(stages))):
                reads = any(j in runs[t] for j in self.users[i])
                needed = self.operators[i].returned or (i not in runs[t] and (needed or reads))
                values[self.keep[t, i]] = needed
        for t in stages:
            values[[self.run[t, i] for i in runs[t]]] = 1.0
            held = sum(self.bytes[i] * values[self.keep[t, i]] for i in range(t))
            for k in range(t + 1):
                held += self.bytes[k] * (k in runs[t])
                values[self.used[t, k]] = held
                for i in (*self.operators[k].reads, k):
                    later = any(k < j and j in runs[t] for j in self.users[i])
                    kept = (t + 1, i) in self.keep and values[self.keep[t + 1, i]]
                    if (t, i, k) in self.free and k in runs[t] and not later and not kept:
                        values[self.free[t, i, k]] = 1.0
                        held -= self.bytes[i]
        return values

    def _add(self, cost: float = 0.0, *, integer: bool = False, upper: float = 1.0) -> int:
        return self.program.add_variables(np.array([cost]), upper=upper, integer=integer)[0]

    def _row(self, terms: dict[int, float], most: float) -> None:
        self.program.add_row(list(terms), list(terms.values()), -math.inf, most)

    def _keep_order(self, t: int) -> None:
        """Add (1b) and (1c): what is read was kept or has just run; what is kept was there a stage before."""
        run, keep = self.run, self.keep
        for i in range(t):
            before = {run[t - 1, i]: -1.0, **({keep[t - 1, i]: -1.0} if i < t - 1 else {})}
            self._row({keep[t, i]: 1.0, **before}, 0.0)
            if self.operators[i].returned:
                self.program.lower[keep[t, i]] = 1.0
        for j in range(t + 1):
            for i in self.operators[j].reads:
                there = {run[t, i]: -1.0, **({keep[t, i]: -1.0} if i < t else {})}
                self._row({run[t, j]: 1.0, **there}, 0.0)

    def _keep_limit(self, t: int) -> None:
        """Add (2) to (7): the bytes in use after node k are those before it, less what is given back, and its own."""
        held = {self.keep[t, i]: self.bytes[i] for i in range(t) if self.bytes[i]}
        for k in range(t + 1):
            used = self.used[t, k] = self._add()
            self.program.add_row(
                [used, *held, self.run[t, k]], [1.0, *(-one for one in held.values()), -self.bytes[k]], 0.0, 0.0
            )
            if self.working[k]:
                self._row({used: 1.0, self.run[t, k]: self.working[k]}, 1.0)
            held = {used: 1.0}
            for i in (*self.operators[k].reads, k):
                if self.bytes[i] and not self.operators[i].returned:
                    held[self._given_back(t, i, k)] = -self.bytes[i]

    def _given_back(self, t: int, i: int, k: int) -> int:
        """Add the variable that i is given back after k runs: not kept, and read by nothing that runs later."""
        free = self.free[t, i, k] = self._add()
        self._row({free: 1.0, self.run[t, k]: -1.0}, 0.0)
        if (t + 1, i) in self.keep:
            self._row({free: 1.0, self.keep[t + 1, i]: 1.0}, 1.0)
        for j in self.users[i]:
            if k < j <= t:
                self._row({free: 1.0, self.run[t, j]: 1.0}, 1.0)
        return free


class Repeated(nn.Module):
    """Equal layers one after the other, and the mean square of what they return."""

    def __init__(self, layer: Callable[[], nn.Module], count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.second(F.relu(self.first(x))))


class Gated(nn.Module):
    """The feed-forward part of a Llama layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Skips(nn.Module):
    """A U-Net of two levels: what goes down is read again on the way up."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(channels, channels, 3, 2, 1) for _ in range(2))
        self.up = nn.ModuleList(nn.Conv2d(2 * channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for down in self.down:
            kept.append(x)
            x = F.relu(down(x))
        for up in self.up:
            x = F.relu(up(torch.cat([F.interpolate(x, scale_factor=2.0), kept.pop()], 1)))
        return x.square().mean()


def _example(module: Callable[[], nn.Module], *shape: int) -> Example:
    with torch.device("meta"):
        return module(), {"x": torch.empty(shape)}


def _gpt() -> Example:
    with torch.device("meta"):
        tokens = torch.empty(64, 128, dtype=torch.long)
        return GPT(Shape(layers=1, width=256, vocabulary=512)), {"tokens": tokens, "targets": tokens.clone()}


MODELS: dict[str, Callable[[], Example]] = {
    "MLP": lambda: _example(lambda: Repeated(lambda: nn.Sequential(nn.Linear(256, 256), nn.GELU()), 6), 65_536, 256),
    "residual": lambda: _example(lambda: Repeated(lambda: Residual(64), 3), 64, 64, 56, 56),
    "gated": lambda: _example(lambda: Repeated(lambda: Gated(256), 3), 65_536, 256),
    "U-Net": lambda: _example(lambda: Skips(32), 64, 32, 64, 64),
    "GPT": _gpt,
}


def at_rest(memory: Memory) -> int:
    """Return the bytes of what is there before the step."""
    return sum(memory.held.get(kind, 0) for kind in ("parameter", "optimizer", "buffer", "input"))


def table_of(name: str, args: argparse.Namespace) -> Table:
    """Our plans and the program's optimum within limits."""
    planning = planning_of(*MODELS[name](), args.cluster)
    planner = planning.planner()
    step, (_, free) = graph_of(planner), planning.plan(None)
    program, layers = Checkmate(step.operators), recomputable(planner.graph)
    memory = planner.solve(planner.constraints).memory
    rest = at_rest(memory)
    held = (rest + program.plain_peak) / memory.peak
    title = f"{name}: {len(program.operators)} operators, {memory.peak / 2**20:.1f} MiB, held {held:.3f} of it"
    result = Table(title=title, title_justify="left")
    for label in ("limit, MiB", "plan adds", "Checkmate adds", "proved", "plan over it", "CPU s"):
        result.add_column(label, justify="right")
    result.add_column("what the plan did")
    for limit in limits_between(planning.smallest_peak(), memory.peak, args.limits + 1)[1:]:
        plan, ours = planning.plan(limit)
        again = [layer for layer in layers if plan is not None and layer.name in plan.recomputed]
        best = program.solve(limit - rest, args.time_limit, step.schedule_of(again))
        result.add_row(*_cells(limit, free.step or 0.0, ours, best))
        print(name, ours, best.seconds, best.bound, file=sys.stderr, flush=True)
    return result


def _cells(limit: int, free: float, ours: Any, best: Optimum) -> Iterator[str]:
    yield f"{limit / 2**20:.1f}"
    yield "no plan" if ours.step is None else f"{ours.step / free - 1:.2%}"
    yield "none found" if best.seconds is None else f"{best.seconds / free:.2%}"
    yield "yes" if best.proved else f"at least {best.bound / free:.2%}"
    yield "" if ours.step is None or best.seconds is None else f"{ours.step / (free + best.seconds):.4f}"
    yield f"{ours.seconds:.1f}"
    yield ours.did


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--limits", type=int, default=4, help="number of limits")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for one integer program")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    console = Console(width=160)
    for name in args.model or MODELS:
        console.print(table_of(name, args))


if __name__ == "__main__":
    main()
