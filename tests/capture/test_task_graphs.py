"""Marks of `replicate` and `split` in the joint graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional

from autoshard.capture.joint import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.task_graphs import Primitive, replicate, set_default_strategy, split
from autoshard.errors import HintError

BATCH = (torch.randn(4, 8), torch.zeros(4, dtype=torch.long))


class Marked(nn.Module):
    """Convolves, attends, drops, normalises, and has a recurrent layer: what capture rewrites."""

    def __init__(self, body: Primitive | None, head: Primitive | None) -> None:
        super().__init__()
        self.marks = body, head
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.BatchNorm1d(8))
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 16)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        body, head = (mark or contextlib.nullcontext() for mark in self.marks)
        with body:
            x = functional.gelu(self.body(x))
            x = x + self.recurrent(x[:, None])[0][:, 0]
        x = x * 2
        with head:
            query = x.view(4, 1, 1, 8)
            x = functional.scaled_dot_product_attention(query, query, query).reshape(4, 8)
            return functional.cross_entropy(self.head(x), y)


def operators(graph: JointGraph) -> list[fx.Node]:
    return [node for node in graph.graph.nodes if node.op == "call_function"]


def marks(graph: JointGraph) -> dict[str, str]:
    """Primitive of every operator that has one."""
    found = ((node.name, graph.task_graph(node)) for node in operators(graph))
    return {name: str(task_graph.primitive) for name, task_graph in found if task_graph is not None}


def test_every_operator_is_marked_in_both_halves_and_nothing_else_changes() -> None:
    plain = capture(Marked(None, None), BATCH, {})
    graph = capture(Marked(replicate(2), split("tp")), BATCH, {})
    assert graph.fingerprint == plain.fingerprint
    paths = [[one.module_path(node) for node in one.graph.nodes if node.op != "output"] for one in (plain, graph)]
    assert paths[0] == paths[1]
    assert marks(plain) == {}
    found = marks(graph)
    bodies = {"body.0", "body.1", "body.2", "recurrent"}
    for node in operators(graph):
        if graph.module_path(node) in bodies:
            assert found[node.name] == "replicate(2)", node
        if graph.module_path(node) == "head":
            assert found[node.name] == "split('tp')", node
    between = {str(node.target) for node in operators(graph) if node.name not in found}
    assert between == {"aten.mul.Tensor", "aten.add.Tensor"}  # x * 2, and gradients of x from both sides of it
    phases = {(graph.phase(node), found.get(node.name)) for node in operators(graph)}
    assert {(half, mark) for half in ("forward", "backward") for mark in ("replicate(2)", "split('tp')")} <= phases


class Repeated(nn.Module):
    def __init__(self, inner: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        super().__init__()
        self.inner = inner
        self.weights = nn.ParameterList(torch.randn(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            with split(2):
                x = x @ weight
                with self.inner():
                    x = x.relu()
                x = x.exp()
        return x.sum()


def places(graph: JointGraph, target: str) -> list[object]:
    nodes = [node for node in operators(graph) if str(node.target) == target]
    found = map(graph.task_graph, nodes)
    return [mark and (str(mark.primitive), mark.place) for mark in found]


def test_every_context_is_a_task_graph_and_the_innermost_counts() -> None:
    graph = capture(Repeated(lambda: replicate()), (torch.randn(2, 4),), {}, grad=False)
    assert places(graph, "aten.mm.default") == [("split(2)", 0), ("split(2)", 2), ("split(2)", 4)]
    assert places(graph, "aten.relu.default") == [("replicate()", 1), ("replicate()", 3), ("replicate()", 5)]
    assert places(graph, "aten.exp.default") == places(graph, "aten.mm.default")
    assert places(graph, "aten.sum.default") == [None]


@contextlib.contextmanager
def raising_within() -> Iterator[None]:
    with contextlib.suppress(ZeroDivisionError), replicate():
        raise ZeroDivisionError
    yield


def test_an_exception_ends_the_context() -> None:
    graph = capture(Repeated(raising_within), (torch.randn(2, 4),), {}, grad=False)
    assert places(graph, "aten.relu.default") == [("split(2)", 0), ("split(2)", 2), ("split(2)", 4)]
    assert places(graph, "aten.sum.default") == [None]


def test_defaults_belong_to_modules_and_the_innermost_counts() -> None:
    module = Marked(None, split(2))
    set_default_strategy(module, replicate(4))
    set_default_strategy(module.recurrent, split(4))
    set_default_strategy(module.head, replicate())
    graph = capture(module, BATCH, {})
    found = marks(graph)
    assert set(found) == {node.name for node in operators(graph)}
    for node in operators(graph):
        path = graph.module_path(node)
        inside = {"recurrent": "split(4)", "head": "split(2)", "body.0": "replicate(4)"}
        assert found[node.name] == inside.get(path, found[node.name])
    set_default_strategy(module, None)
    set_default_strategy(module.recurrent, None)
    again = marks(capture(module, BATCH, {}))
    assert set(again.values()) == {"split(2)"}


def test_outside_a_capture_nothing_happens() -> None:
    marked, plain = Marked(replicate(3), split(5)).eval(), Marked(None, None).eval()
    plain.load_state_dict(marked.state_dict())
    assert torch.equal(marked(*BATCH), plain(*BATCH))
    compiled = torch.compile(Repeated(lambda: replicate()), backend="eager", fullgraph=True)
    assert compiled(torch.randn(2, 4)).ndim == 0


@pytest.mark.parametrize("primitive", [replicate, split])
@pytest.mark.parametrize("devices", [0, -2, True, 2.0, (), ("dp", 2), b"dp"])
def test_what_is_no_number_of_devices_is_refused(primitive: Callable[..., Primitive], devices: object) -> None:
    with pytest.raises(HintError, match=r"give a number of devices, such as \w+\(4\), or names of mesh axes"):
        primitive(devices)


def test_what_is_no_strategy_is_refused() -> None:
    with pytest.raises(HintError, match=r"choose autoshard\.replicate\(n\), autoshard\.split\(n\), or None"):
        set_default_strategy(nn.Linear(2, 2), "replicate")  # type: ignore[arg-type]
    with pytest.raises(HintError, match="the default is a module's"):
        set_default_strategy(replicate(2), replicate(2))  # type: ignore[arg-type]


def test_primitives_read_as_they_are_written() -> None:
    written = (replicate(), replicate(4), split("tp"), split(["ep", "tp"]))
    assert list(map(str, written)) == ["replicate()", "replicate(4)", "split('tp')", "split('ep', 'tp')"]
