"""Rules of whole graphs: split points travel to every operator that touches the same factor."""

from __future__ import annotations

import operator

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import HintError
from autoshard.patterns.graph_rules import GraphRules, Value, operand_nodes, pinned_spec, value_of, whole_rule
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec, shard_placement
from tests.planner.steps import joint_graph

MESH = MeshShape.of({"x": 4})


@pytest.fixture(scope="module")
def gpt() -> GraphRules:
    return GraphRules(joint_graph("gpt"), MESH)


def _placeholder(graph: JointGraph, name: str) -> Value:
    return Value(next(source.node for source in graph.inputs if source.name == name))


def test_operators_run_forward_first_and_take_what_is_made_before(gpt: GraphRules) -> None:
    phases = [gpt.graph.phase(node) for node in gpt.operators]
    assert phases == sorted(phases, key=["forward", "backward"].index)
    made = {Value(source.node) for source in gpt.graph.inputs}
    for node in gpt.operators:
        assert all(value_of(source) in made for source in operand_nodes(node))
        made |= {Value(node, index) for index in range(len(gpt.calls[node].results))}
    assert not any(node.target is operator.getitem for node in gpt.operators)


def test_equal_calls_and_rules_are_one_object(gpt: GraphRules) -> None:
    assert len({id(call) for call in gpt.calls.values()}) == len(set(gpt.calls.values())) < len(gpt.operators)
    assert len({id(rule) for rule in gpt.rules.values()}) < len(gpt.rules) / 2


def test_every_rule_fits_its_call(gpt: GraphRules) -> None:
    for node in gpt.operators:
        gpt.rules[node].check(gpt.calls[node])


def test_values_uses_and_outputs_cover_the_graph(gpt: GraphRules) -> None:
    values = list(gpt.values())
    assert len(set(values)) == len(values)
    assert set(gpt.uses) <= set(values)
    assert sum(map(len, gpt.uses.values())) == sum(len(list(operand_nodes(node))) for node in gpt.operators)
    delivered = [output for output in gpt.graph.outputs if output.node is not None]
    assert sorted(map(id, delivered)) == sorted(id(one) for outputs in gpt.outputs_of.values() for one in outputs)


@pytest.mark.parametrize("split", ["view", "chunk", "split"])
def test_the_split_of_a_fused_projection_reaches_the_weight(split: str) -> None:
    """(3, heads, size): the weight may be sharded by heads, and so may its gradient."""
    rules = GraphRules(joint_graph("gpt", split=split), MESH)
    weight = _placeholder(rules.graph, "layers.0.attention.qkv.weight")
    rule = rules.rules[weight.node]
    sizes = [rule.factors[factor].size for factor in rule.results[0][0]]  # type: ignore[index]
    assert sizes[0] == 3
    assert sizes[:2] == [3, 12]


def test_rules_of_unsplit_tensors_stay_whole() -> None:
    rules = GraphRules(joint_graph("mlp"), MESH)
    weight = _placeholder(rules.graph, "up.weight")
    assert [factor.size for factor in rules.rules[weight.node].factors] == [48, 24]


def test_a_cut_that_blocks_an_axis_is_left_out() -> None:
    """A dim of 8 is viewed as 2 x 4: of no use to an axis of 8, which divides it whole."""

    class Viewed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight).view(-1, 2, 4).square().sum()

    graph = capture(Viewed(), (torch.randn(8, 8),), {})
    weight = _placeholder(graph, "weight").node
    assert [f.size for f in GraphRules(graph, MeshShape.of({"x": 8})).rules[weight].factors] == [8, 8]
    assert [f.size for f in GraphRules(graph, MeshShape.of({"x": 2})).rules[weight].factors] == [8, 2, 4]


def test_operators_without_a_rule_are_counted_and_whole() -> None:
    class Unknown(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.pdist(x) + torch.pdist(x + 1)

    rules = GraphRules(capture(Unknown(), (torch.randn(4, 4),), {}, grad=False), MESH)
    assert rules.unknown == {"aten._pdist_forward.default": 2}
    node = next(node for node in rules.operators if "pdist" in str(node.target))
    assert rules.rules[node] == whole_rule(rules.calls[node])
    assert rules.rules[node].factors == ()


def test_names_of_values_tell_results_apart(gpt: GraphRules) -> None:
    node = next(node for node in gpt.operators if len(gpt.calls[node].results) > 1)
    assert (Value(node).name, Value(node, 1).name) == (node.name, f"{node.name}:1")
    user = next(user for user in node.users if user.target is operator.getitem)
    assert value_of(user) == Value(node, user.args[1])  # type: ignore[arg-type]


def test_operands_in_lists_are_found_in_order() -> None:
    class Joined(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.cat([y, x, y], 1)

    graph = capture(Joined(), (torch.randn(2, 3), torch.randn(2, 3)), {}, grad=False)
    (node,) = GraphRules(graph, MESH).operators
    x, y = (source.node for source in graph.inputs)
    assert list(operand_nodes(node)) == [y, x, y]


@pytest.mark.parametrize(
    ("placements", "text"),
    [
        ((Shard(0),), "S(0) R"),
        ((Replicate(), Shard(-1)), "R S(1)"),
        ((shard_placement(1, 3), Shard(0)), "S(1,f=3) S(0)"),
    ],
)
def test_pins_fit_the_mesh(placements: tuple[Shard, ...], text: str) -> None:
    assert pinned_spec(placements, (12, 12), MeshShape.of({"x": 2, "y": 2}), "") is Spec.parse(text)


def test_a_plain_shard_over_one_axis_need_not_divide() -> None:
    mesh = MeshShape.of({"x": 2, "y": 4})
    assert pinned_spec((Replicate(), Shard(0)), (6, 12), mesh, "") is Spec.parse("R S(0)")
    assert pinned_spec((Shard(1), Shard(0)), (3, 7), mesh, "") is Spec.parse("S(1) S(0)")


@pytest.mark.parametrize(
    ("placements", "said"),
    [
        ((Shard(0),) * 3, r"in the root module names 3 placements, but the mesh has the axes x=2, y=4"),
        ((Shard(3),), r"does not fit a tensor of shape \[6, 12\]"),
        ((Shard(0), Shard(0)), r"does not divide a tensor of shape \[6, 12\] evenly"),
        ((Replicate(), shard_placement(0, 2)), r"does not divide a tensor of shape \[6, 12\] evenly"),
    ],
)
def test_pins_that_do_not_fit_are_errors(placements: tuple[Shard, ...], said: str) -> None:
    with pytest.raises(HintError, match=said):
        pinned_spec(placements, (6, 12), MeshShape.of({"x": 2, "y": 4}), "")


def test_models_have_no_unknown_operators(gpt: GraphRules) -> None:
    assert gpt.unknown == {}
