"""Marks of `replicate` and `split` in the joint graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.nn import functional

from autoshard.capture import shard
from autoshard.capture._torch import StridedShard
from autoshard.capture.joint import capture
from autoshard.capture.joint_graph import JointGraph
from autoshard.capture.marks import Primitive, capturing, parse_pin, pin_text, replicate, set_default_strategy, split
from autoshard.errors import HintError
from tests.capture.interpret import run_joint

NDIM = 3
PLACEMENTS = st.one_of(
    st.just(Replicate()),
    st.builds(Partial, st.sampled_from(["sum", "avg", "max", "min"])),
    st.builds(Shard, st.integers(0, NDIM - 1)),
    st.builds(lambda dim, factor: StridedShard(dim, split_factor=factor), st.integers(0, NDIM - 1), st.integers(2, 9)),
)


class Pinned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return shard(self.linear(x), Shard(-1), Replicate()).square().sum()


@given(st.lists(PLACEMENTS, min_size=1, max_size=3))
def test_text_round_trip(placements: list[Placement]) -> None:
    assert parse_pin(pin_text(tuple(placements), NDIM)) == tuple(placements)


def test_text() -> None:
    placements = (Replicate(), Shard(-3), StridedShard(1, split_factor=3), Partial("sum"))
    assert pin_text(placements, NDIM) == "R;S(0);S(1,f=3);P(sum)"


@pytest.mark.parametrize("text", ["", "S", "S(x)", "S(0);", "Q(1)", "s(0)"])
def test_text_that_is_none(text: str) -> None:
    with pytest.raises(HintError, match="is not a placement"):
        parse_pin(text)


def test_identity_outside_of_capture() -> None:
    x = torch.ones(2)
    assert shard(x, Shard(0)) is x


def test_pin_is_seen_forward_and_backward() -> None:
    module, x = Pinned(), torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, 4)
    graph = capture(module, (x,), {})
    pins = [(graph.phase(node), graph.pin(node)) for node in graph.graph.nodes if graph.pin(node)]
    assert pins == [("forward", (Shard(1), Replicate())), ("backward", (Shard(1), Replicate()))]
    step = run_joint(graph, module, (x,))
    module(x).backward()
    torch.testing.assert_close(step.gradients["linear.weight"], module.linear.weight.grad)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ((Shard(2),), "out of range for a tensor of 2 dims"),
        ((Shard(-3),), "out of range for a tensor of 2 dims"),
        (("S(0)",), "'S\\(0\\)' is no placement"),
        ((), "one placement per mesh axis"),
    ],
)
def test_bad_placements(placements: tuple[Placement, ...], message: str) -> None:
    with capturing(), pytest.raises(HintError, match=message):
        shard(torch.ones(2, 2), *placements)


def test_bad_placement_is_reported_by_capture() -> None:
    class Bad(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shard(super().forward(x), Shard(7))

    with pytest.raises(HintError, match="S\\(7\\) is out of range"):
        capture(Bad(4, 4), (torch.ones(2, 4),), {})


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
    return {name: str(task_graph.primitives[0]) for name, task_graph in found if task_graph is not None}


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
    return [mark and (str(mark.primitives[0]), mark.place) for mark in found]


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
