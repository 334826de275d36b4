"""The order of eliminations on a line, and where nodes have to be settled."""

from __future__ import annotations

from autoshard.solver.frontier_track import frontier_order

NODES = 9
LINE = {node: [other for other in (node - 1, node + 1) if 0 <= other < NODES] for node in range(NODES)}


def order(linear: bool) -> list[int]:
    return [node for node, _ in frontier_order(dict.fromkeys(LINE, 4), LINE, linear, 100).steps]


def test_dynamic_programming_runs_along_a_line_from_one_end() -> None:
    chosen = order(linear=True)
    assert chosen in (list(range(NODES)), list(reversed(range(NODES))))


def test_elimination_keeps_both_ends_to_the_last() -> None:
    chosen = order(linear=False)
    assert set(chosen[-2:]) == {0, NODES - 1}


def test_a_node_that_every_layer_reads_is_settled_where_tables_would_be_too_large() -> None:
    """A ring of layers around an attention mask."""
    layers = {node: {(node - 1) % 8, (node + 1) % 8, 8} for node in range(8)}
    ring = {**layers, 8: set(range(8))}
    plain = frontier_order(dict.fromkeys(ring, 5), ring, True, 5**4)
    assert not plain.conditioned
    narrow = frontier_order(dict.fromkeys(ring, 5), ring, True, 5**2)
    assert narrow.conditioned == (8,)
    assert sorted(node for node, _ in narrow.steps) == list(range(8))
