from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from autoshard.solver.buckets import Scope, buckets


@given(order=st.permutations(range(6)), scopes=st.lists(st.sets(st.integers(0, 5), max_size=3).map(tuple), max_size=8))
def test_every_term_is_summed_once_where_the_first_of_its_nodes_goes(order: list[int], scopes: list[Scope]) -> None:
    tree = buckets(order, list(enumerate(scopes)), lambda term: term[1])
    assert [bucket.node for bucket in tree] == order
    place = {node: number for number, node in enumerate(order)}
    homes = {number: bucket.node for bucket in tree for number, _ in bucket.terms}
    assert homes == {number: min(scope, key=place.__getitem__) for number, scope in enumerate(scopes) if scope}
    assert sum(len(bucket.terms) for bucket in tree) == len(homes)
    for bucket in tree:
        inputs = [scope for _, scope in bucket.terms] + [tree[child].rest for child in bucket.children]
        assert set(bucket.scope) == {bucket.node}.union(*inputs)
        assert list(bucket.scope) == sorted(bucket.scope, key=place.__getitem__, reverse=True)
    parents = [child for bucket in tree for child in bucket.children]
    assert sorted(parents) == [number for number, bucket in enumerate(tree) if bucket.rest]
