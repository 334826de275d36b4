"""Problems for the tests: random small ones, layered ones, and ones with two mesh axes."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
from hypothesis import strategies as st

from autoshard.solver import Edge, Problem, solve


def brute_force(problem: Problem) -> float:
    """The optimum, by trying everything; `inf` where nothing is feasible."""
    every = product(*(range(len(vector)) for vector in problem.costs))
    return min((problem.cost(choice) for choice in every if problem.feasible(choice)), default=float("inf"))


def layered_problem(layers: int, *, per_layer: int = 110, strategies: int = 6, seed: int = 0) -> Problem:
    """A long and thin problem of identical layers: chains with short cuts, two edges from layer to layer."""
    random = np.random.default_rng(seed)
    shape = (strategies, strategies)
    costs = [random.random(strategies) for _ in range(per_layer)]
    inner = [(node - 1, node, random.random(shape)) for node in range(1, per_layer)]
    joined = [node for node in range(4, per_layer) if random.random() < 0.35]
    inner += [(int(random.integers(max(0, node - 12), node - 1)), node, random.random(shape)) for node in joined]
    outer = [(per_layer - 1, 0, random.random(shape)), (per_layer // 2, 3, random.random(shape))]
    edges = []
    for layer in range(layers):
        base = layer * per_layer
        edges += [Edge(base + source, base + target, table) for source, target, table in inner]
        if layer:
            edges += [Edge(base - per_layer + source, base + target, table) for source, target, table in outer]
    return Problem(tuple(costs) * layers, tuple(edges))


def two_axes(nodes: int, *, labels: int = 5, seed: int = 0, density: float = 0.5) -> Problem:
    """Strategies are pairs of labels; changing a label costs, the less the more the other axis is sharded."""
    random = np.random.default_rng(seed)
    shards = np.array([1, *[8] * (labels - 1)])
    pairs = np.array(list(product(range(labels), repeat=2)))
    split = 1.0 / (shards[pairs[:, 0]] * shards[pairs[:, 1]])
    costs, edges = [], []
    for node in range(nodes):
        work = random.random((labels, labels)) ** 3
        costs.append(10 * split * random.random() + work[pairs[:, 0], pairs[:, 1]])
        if node:
            edges.append(Edge(node - 1, node, _resharding(random, pairs, labels)))
        if node > 3 and random.random() < density:
            source = int(random.integers(max(0, node - 8), node - 1))
            edges.append(Edge(source, node, _resharding(random, pairs, labels)))
    return Problem(tuple(costs), tuple(edges), components=tuple([pairs] * nodes))


def with_memory(problem: Problem, fraction: float, *, seed: int = 0) -> Problem:
    """The problem with random usages, half of them held all the time.

    Args:
        fraction: where the limit lies between the smallest sum of usages (0) and the peak of the optimum without
            a limit (1), which elimination must be able to find.
    """
    random = np.random.default_rng(seed)
    usages = tuple(np.round(random.integers(1, 100) * random.random(len(vector)) * 100) for vector in problem.costs)
    count = problem.size
    intervals = tuple((0, 2 * count) if node % 2 else (node, 2 * count - node) for node in range(count))
    free = replace(problem, usages=usages, intervals=intervals)
    least = free.peak([int(usage.argmin()) for usage in usages])
    peak = free.peak(solve(problem).assignment)
    return replace(free, limit=least + fraction * (peak - least))


def _resharding(random: np.random.Generator, pairs: np.ndarray, labels: int) -> np.ndarray:
    size = random.random() + 0.1
    kinds = [random.random((labels, labels)) * (1 - np.eye(labels)) for _ in range(2)]
    first, second = pairs[:, 0], pairs[:, 1]
    cost = kinds[0][first[:, None], first] * np.where(second == 0, 1, 0.125)[:, None]
    cost = cost + 4 * kinds[1][second[:, None], second] * np.where(first == 0, 1, 0.125)[None, :]
    return size * cost


@st.composite
def small_problems(draw: st.DrawFn, *, memory: bool = True) -> Problem:
    """At most six nodes of at most four strategies: parallel edges, forbidden entries, lives, limits, labels."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    forbidden = draw(st.sampled_from([0.0, 0.1, 0.3]))

    def table(*shape: int) -> np.ndarray:
        values = random.integers(-3, 10, shape).astype(float)
        values[random.random(shape) < forbidden] = np.inf
        return values

    ends = [random.choice(len(sizes), 2, replace=False) for _ in range(draw(st.integers(0, 12))) if len(sizes) > 1]
    fields = {}
    if memory:
        fields["usages"] = tuple(random.integers(0, 10, size).astype(float) for size in sizes)
        fields["intervals"] = tuple(tuple(int(end) for end in random.integers(0, 8, 2)) for _ in sizes)
        fields["limit"] = draw(st.one_of(st.none(), st.integers(0, 30).map(float)))
    return Problem(
        tuple(table(size) for size in sizes),
        tuple(Edge(int(a), int(b), table(sizes[a], sizes[b])) for a, b in ends),
        components=tuple(np.stack([np.arange(size) // 2, np.arange(size) % 2], 1) for size in sizes),
        **fields,
    )
