from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import autoshard
from autoshard.capture.describe import freeze, refresh_views, simplify
from autoshard.capture.joint import capture
from tests.capture.interpret import run_joint
from tests.planner.steps import joint_graph
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks

aten = torch.ops.aten


def simplified(function: Callable[[torch.Tensor], object], phases: dict[str, str] | None = None) -> fx.GraphModule:
    """The simplified graph of a function of a (2, 3, 4) tensor; `phases` names nodes of the backward half."""
    module = make_fx(function)(torch.randn(2, 3, 4))
    for node in module.graph.nodes:
        node.meta["partitioner_tag"] = (phases or {}).get(node.name, "is_forward")
    simplify(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def targets(module: fx.GraphModule) -> list[object]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.mul(aten.detach(aten.neg(x)), 1.0),
        lambda x: aten.pow(aten.neg(x), 1),
        lambda x: aten.transpose(aten.transpose(aten.neg(x), 1, -1), 2, 1),
        lambda x: aten.view(aten.neg(x), [2, 3, 4]),
        lambda x: aten.slice(aten.neg(x), 1, 0, 3),
        lambda x: aten.expand(aten.neg(x), [2, 3, 4]),
        lambda x: aten.view(aten.clone(aten.neg(x)), [2, 3, 4]),
    ],
)
def test_identities_go(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    module = simplified(function)
    assert targets(module) == [aten.neg.default]
    x = torch.randn(2, 3, 4)
    assert torch.equal(module(x), function(x))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: aten.transpose(aten.transpose(x, 0, 1), 1, 2),
        lambda x: aten.neg(aten.clone(aten.transpose(x, 0, 1), memory_format=torch.contiguous_format)),
        lambda x: aten._to_copy(x, dtype=torch.float64),
        lambda x: aten.slice(x, 1, 0, 2),
        lambda x: aten.mul(x, 2.0),
        lambda x: aten.expand(x, [5, 2, 3, 4]),
    ],
)
def test_what_is_no_identity_stays(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    before = [node.target for node in make_fx(function)(torch.randn(2, 3, 4)).graph.nodes if node.op == "call_function"]
    assert targets(simplified(function)) == before


def test_common_subexpressions_are_merged() -> None:
    module = simplified(lambda x: aten.add(aten.exp(x), aten.exp(x)))
    assert targets(module) == [aten.exp.default, aten.add.Tensor]


def test_arguments_of_different_types_are_not_merged() -> None:
    module = simplified(lambda x: (aten.full([2], 1), aten.full([2], 1.0), aten.full([2], True)))
    assert len(targets(module)) == 3


def test_random_numbers_are_not_merged() -> None:
    module = simplified(lambda x: aten.add(aten.rand_like(x), aten.rand_like(x)))
    assert targets(module).count(aten.rand_like.default) == 2


def test_across_phases_only_views_are_merged() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return aten.exp(x), aten.neg(aten.transpose(x, 0, 1)), aten.exp(x), aten.sin(aten.transpose(x, 0, 1))

    backward = {"exp_1": "is_backward", "transpose_1": "is_backward", "sin": "is_backward"}
    found = targets(simplified(function, backward))
    assert found.count(aten.exp.default) == 2
    assert found.count(aten.transpose.int) == 1


def test_dead_code_goes() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        aten.rand_like(aten.exp(x))
        return aten.neg(x)

    assert targets(simplified(function)) == [aten.neg.default]


def test_freeze_tells_types_apart() -> None:
    assert freeze([1, {"a": slice(0, 1)}]) == freeze((1, {"a": slice(0, 1)}))
    assert len({freeze(value) for value in (1, 1.0, True)}) == 3


def test_operands_without_elements_leave_a_concatenation() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return aten.cat([aten.new_empty(x, [0]), x, aten.slice(x, 0, 0, 0), x], 0)

    module = simplified(function)
    assert targets(module) == [aten.cat.default]
    (cat,) = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert len(cat.args[0]) == 2


def test_a_concatenation_that_promotes_or_has_no_elements_at_all_stays() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        wide = aten.new_empty(x, [0], dtype=torch.float64)
        return aten.cat([wide, x]), aten.cat([wide, wide])

    module = simplified(function)
    cats = module.graph.find_nodes(op="call_function", target=aten.cat.default)
    assert [len(cat.args[0]) for cat in cats] == [2, 2]


def _tagged(graph: fx.Graph, phase: str, op: object, *args: object) -> fx.Node:
    node = graph.call_function(op, args)  # type: ignore[arg-type]
    node.meta["partitioner_tag"] = f"is_{phase}"
    return node


def _is_backward(node: fx.Node) -> bool:
    return node.meta.get("partitioner_tag") == "is_backward"


def test_chains_of_views_are_taken_anew_once() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    turned = _tagged(graph, "forward", aten.t.default, weight)
    wide = _tagged(graph, "forward", aten.unsqueeze.default, turned, 0)
    forward = _tagged(graph, "forward", aten.mul.Tensor, x, wide)
    first = _tagged(graph, "backward", aten.mul.Tensor, forward, wide)
    second = _tagged(graph, "backward", aten.add.Tensor, first, turned)
    graph.output((forward, second, _tagged(graph, "backward", aten.add.Tensor, second, wide)))
    refresh_views(graph, [weight], _is_backward)
    graph.lint()
    assert set(turned.users) == {wide}
    assert set(wide.users) == {forward}
    views = [node for node in graph.nodes if node.target in (aten.t.default, aten.unsqueeze.default)]
    assert len(views) == 4
    assert [_is_backward(view) for view in views] == [False, False, True, True]
    assert views[3].args[0] is views[2]
    assert views[2].args[0] is weight


def test_views_of_what_is_no_parameter_and_other_operators_stay() -> None:
    graph = fx.Graph()
    weight, x = graph.placeholder("weight"), graph.placeholder("x")
    view = _tagged(graph, "forward", aten.t.default, x)
    work = _tagged(graph, "forward", aten.neg.default, weight)
    graph.output(_tagged(graph, "backward", aten.add.Tensor, view, work))
    before = str(graph)
    refresh_views(graph, [weight], _is_backward)
    assert str(graph) == before


@pytest.mark.parametrize("name", ["mlp", "gpt", "hf_llama"])
def test_no_view_of_a_parameter_is_read_by_both_halves(name: str) -> None:
    graph = joint_graph(name)
    views = {source.node for source in graph.inputs if source.kind == "parameter"}
    turned = 0
    for node in graph.graph.nodes:
        if node.target in (aten.t.default, aten.permute.default, aten.view.default) and node.args[0] in views:
            views.add(node)
            assert {graph.phase(user) for user in node.users} == {graph.phase(node)}
            turned += 1
    assert turned


def test_no_view_is_left_without_a_use() -> None:
    assert all(node.users for node in joint_graph("gpt").graph.nodes if node.op == "call_function")


class Queue(nn.Module):
    """Scores against a queue of keys, into which the keys of the batch go (MoCo)."""

    queue: torch.Tensor
    place: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.linspace(-1, 1, 96, dtype=torch.float64).cos().view(8, 12))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for ours, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
            keys = self.key(x)
        queries = self.query(x)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ self.queue.clone().detach()], 1)
        with torch.no_grad():
            places = (self.place + torch.arange(4)) % 12
            self.queue[:, places] = keys.T
            self.place[0] = (self.place[0] + 4) % 12
        return scores.logsumexp(1).mean() - scores[:, 0].mean()


def _queue() -> Queue:
    torch.manual_seed(0)
    return Queue()


X = torch.linspace(-2, 2, 32, dtype=torch.float64).sin().view(4, 8)


def test_a_copy_of_what_is_changed_later_stays_a_copy() -> None:
    module = _queue()
    graph = capture(module, (X,), {})
    copies = [node for node in graph.graph.nodes if node.target is aten.clone.default]
    assert [copy.all_input_nodes[0] for copy in copies] == [item.node for item in graph.inputs if item.name == "queue"]
    assert list(copies[0].all_input_nodes[0].users) == copies
    changed = {output.name for output in graph.outputs if output.kind == "mutation"}
    assert changed == {"queue", "place", "key.weight", "key.bias"}
    assert torch.equal(run_joint(graph, module, (X,)).output, module(X))


def test_without_gradients_nothing_is_copied() -> None:
    graph = capture(_queue(), (X,), {}, grad=False)
    assert not [node for node in graph.graph.nodes if node.target is aten.clone.default]


def _train(module: Queue) -> dict[str, list[torch.Tensor]]:
    """Losses of four steps, in the third of which the module is called twice before backward, and what is left."""
    optimizer = torch.optim.SGD(module.query.parameters(), lr=0.1)
    found = {}
    for step in range(4):
        loss = module(X)
        if step == 2:
            loss = loss + module(0.5 * X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
    found |= {name: parameter.detach() for name, parameter in module.named_parameters()} | dict(module.named_buffers())
    return {name: held_by_ranks(value) for name, value in found.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_queue_of_keys_and_a_teacher_that_follows_train_as_on_one_device(ranks: int) -> None:
    module = _queue()
    expected = _train(copy.deepcopy(module))
    with simulated_mesh(x=ranks) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        found = _train(module)
    for name, values in found.items():
        for value in values:
            assert torch.allclose(value, expected[name][0], rtol=TOLERANCE, atol=TOLERANCE), name
