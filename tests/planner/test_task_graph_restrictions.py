"""Plans under the primitives of Whale."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.capture.marks import Primitive, replicate, split
from autoshard.errors import BudgetError, HintError
from autoshard.patterns.strategy import WHOLE
from autoshard.planner.task_graph_restrictions import Restriction, axes_of
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from tests.models.routed import sorted_experts
from tests.option_groups import grouped
from tests.training import fast_links

BATCH = (torch.randn(8, 16), torch.zeros(8, dtype=torch.long))
R = Replicate()


class Hybrid(nn.Module):
    """Features and a classifier, each with a primitive."""

    def __init__(self, features: Primitive | None, classifier: Primitive | None, layers: int = 2) -> None:
        super().__init__()
        self.marks = features, classifier
        self.features = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16)) for _ in range(layers)])
        self.classes = nn.Linear(16, 64)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        with self.marks[0] or contextlib.nullcontext():
            x = self.features(x)
        with self.marks[1] or contextlib.nullcontext():
            return functional.cross_entropy(self.classes(x), labels)


def planned(module: nn.Module, mesh: dict[str, int], **options: object) -> ShardingPlan:
    return autoshard.plan(module, mesh, BATCH, **grouped({"cluster": fast_links(), "time_limit": 300.0} | options))


def strategies(plan: ShardingPlan, operator: str, modules: str) -> dict[str, set[str]]:
    """Per mesh axis, what the calls of an operator in modules of some prefix are split by."""
    found: dict[str, set[str]] = defaultdict(set)
    for choice in plan.choices:
        if choice.operator == operator and choice.module.startswith(modules):
            split_on = dict(reversed(part.split(" on ")) for part in choice.strategy.split(", ") if " on " in part)
            for axis in plan.mesh.names:
                found[axis].add(split_on.get(axis, "whole"))
    return dict(found)


MESHES = [
    ({"x": 2}, 2, "x", "x"),
    ({"x": 2, "y": 4}, 2, "x", "x"),
    ({"x": 2, "y": 2}, 2, "x", "y"),
    ({"x": 2, "y": 2}, 4, "xy", "xy"),
    ({"x": 2, "y": 2}, None, "xy", "xy"),
    ({"x": 2, "y": 1}, "y", "", ""),
    ({"x": 2, "y": 2, "z": 2}, ("z", "x"), "xz", "xz"),
    ({"x": 2, "y": 2, "z": 2}, 4, "xy", "yz"),
]


@pytest.mark.parametrize(("mesh", "devices", "replicated", "splitting"), MESHES)
def test_replicas_split_the_batch_and_shards_something_else(
    mesh: dict[str, int], devices: object, replicated: str, splitting: str
) -> None:
    plan = planned(Hybrid(replicate(devices), split(devices)), mesh)  # type: ignore[arg-type]
    products = strategies(plan, "aten.addmm", "features")
    for axis in replicated:
        assert products[axis] == {"i"}
        assert strategies(plan, "aten.native_layer_norm", "features")[axis] == {"dim0"}
        assert strategies(plan, "aten.mm", "features")[axis] <= {"i", "k"}  # gradients of inputs, of weights
        for name in plan.placements:
            if name.startswith("features"):
                assert plan.placements[name][plan.mesh.names.index(axis)] == R
    for axis in splitting:
        assert strategies(plan, "aten.addmm", "classes")[axis] <= {"j", "k"}
        assert strategies(plan, "aten.mm", "classes")[axis] <= {"i", "j", "k"}
        assert "whole" not in strategies(plan, "aten.mm", "classes")[axis]
        assert plan.placements["classes.weight"][plan.mesh.names.index(axis)] != R
    assert plan.hints[str(replicate(devices))] == (" x ".join(replicated) or "one device")  # type: ignore[arg-type]


def test_without_primitives_the_planner_is_free() -> None:
    module = Hybrid(None, None)
    plan = planned(module, {"x": 2})
    assert plan.hints == {}
    assert plan.cost < planned(Hybrid(split(), replicate()), {"x": 2}).cost


def test_a_hint_on_a_parameter_counts_more_than_its_task_graph() -> None:
    plan = planned(Hybrid(replicate(2), split(2)), {"x": 2, "y": 2}, hints={"features.0.0.weight": {"x": Shard(1)}})
    assert plan.placements["features.0.0.weight"][0] == Shard(1)
    assert plan.placements["features.1.0.weight"][0] == R


def test_parameters_in_shards_are_cast_before_they_are_gathered() -> None:
    module = Hybrid(None, None)
    autoshard.set_default_strategy(module, replicate(2))
    hints = {name: {"x": Shard(0)} for name, _ in module.named_parameters()}
    plan = planned(module, {"x": 2}, hints=hints, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    gathered = [one for one in plan.collectives if one.kind == "all_gather" and one.module == "classes"]
    assert {one.phase for one in gathered} == {"forward"}, "gradients stay where their parameters lie"
    assert sum(one.bytes * one.count for one in gathered) == (64 * 16 + 64) // 2 * 2, "two bytes for every element"


def test_a_default_covers_what_no_primitive_does() -> None:
    module = Hybrid(None, None)
    autoshard.set_default_strategy(module, split("x"))
    autoshard.set_default_strategy(module.features, replicate("x"))
    plan = planned(module, {"x": 2})
    assert strategies(plan, "aten.addmm", "features") == {"x": {"i"}}
    assert strategies(plan, "aten.addmm", "classes")["x"] <= {"j", "k"}


def test_hints_make_task_graphs_of_modules() -> None:
    hints = {"features.*": replicate("x"), "classes": split("x"), "features.1.0.weight": Shard(0)}
    plan = planned(Hybrid(None, None), {"x": 2}, hints=hints)
    assert strategies(plan, "aten.addmm", "features") == {"x": {"i"}}
    assert strategies(plan, "aten.addmm", "classes")["x"] <= {"j", "k"}
    assert plan.placements["features.0.0.weight"] == (R,)
    assert plan.placements["features.1.0.weight"] == (Shard(0),)
    assert plan.hints["features.*"] == "replicate('x')"
    assert plan.hints["split('x')"] == "x"


def test_contexts_count_more_than_hints_and_hints_more_than_defaults() -> None:
    module = Hybrid(None, split("x"))
    autoshard.set_default_strategy(module, split("x"))
    plan = planned(module, {"x": 2}, hints={"features": replicate("x"), "classes": replicate("x")})
    assert strategies(plan, "aten.addmm", "features") == {"x": {"i"}}
    assert strategies(plan, "aten.addmm", "classes")["x"] <= {"j", "k"}


@pytest.mark.parametrize(
    ("hints", "message"),
    [
        ({"feature": split()}, r"the hint 'feature': split\(\) matches no module\. Close ones are features"),
        (
            {"features.*": split(2), "*.0": replicate(2)},
            r"contradict each other on the module features\.\S+: 'features\.\*' asks for split\(2\), '\*\.0' for",
        ),
        ({"classes": split(3)}, "asks for 3 devices"),
    ],
)
def test_hints_that_make_no_sense_are_errors(hints: dict[str, object], message: str) -> None:
    with pytest.raises(HintError, match=message):
        planned(Hybrid(None, None), {"x": 2}, hints=hints)


class Chosen(nn.Module):
    """A weight of its own for every word, taken from a table by index, after vectors of words and of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(8, 8), nn.Parameter(torch.randn(6, 8))
        self.weights = nn.Parameter(torch.randn(8, 16, 8))

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.positions
        with autoshard.split():
            chosen = self.weights[words.flatten()]
            return (chosen @ x.view(24, 8, 1)).view(4, 6, 16).relu().sum()


def test_a_split_is_of_dims_of_weights_however_they_are_reached() -> None:
    words = (torch.zeros(4, 6, dtype=torch.long),)
    plan = autoshard.plan(Chosen(), {"x": 2}, words, cluster=fast_links(), search=autoshard.Search(time_limit=300.0))
    products = {choice.strategy for choice in plan.choices if choice.operator == "aten.bmm"}
    assert products <= {f"{factor} on x" for factor in "ijk"}  # not the words of a sequence: b.1


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_primitives_hold_under_a_limit_and_where_layers_run_again(recompute: str) -> None:
    module, mesh = Hybrid(replicate(2), split(2), layers=6), {"x": 2, "y": 2}
    free = planned(module, mesh, recompute=recompute)
    plan = planned(module, mesh, recompute=recompute, memory_limit=int(free.memory.peak * 0.97))
    assert plan.memory.peak <= 0.97 * free.memory.peak
    assert strategies(plan, "aten.addmm", "features")["x"] == {"i"}
    assert strategies(plan, "aten.addmm", "classes")["y"] <= {"j", "k"}
    assert plan.placements["features.1.0.weight"][0] == R
    with pytest.raises(BudgetError, match="drop the hints"):
        planned(module, mesh, recompute=recompute, memory_limit=free.memory.peak // 3)


@pytest.mark.parametrize(
    ("primitive", "message"),
    [
        (lambda: replicate(3), r"autoshard\.replicate\(3\) asks for 3 devices.* Possible are 2, 4, 8"),
        (lambda: split(16), r"autoshard\.split\(16\) asks for 16 devices, and no axis of the mesh dp=2, tp=4"),
        (
            lambda: split("ep"),
            r"autoshard\.split\('ep'\) names the mesh axis 'ep'; the axes of this mesh are dp=2, tp=4",
        ),
    ],
)
def test_devices_that_the_mesh_has_not_are_an_error(primitive: Callable[[], Primitive], message: str) -> None:
    with pytest.raises(HintError, match=message):
        planned(Hybrid(primitive(), split()), {"dp": 2, "tp": 4})


def test_one_device_is_any_mesh_without_a_choice() -> None:
    graph = capture(Hybrid(replicate(1), split()), BATCH, {})
    assert axes_of(graph, MeshShape.of({"x": 1, "y": 4})) == {replicate(1): (), split(): (1,)}


def test_a_restriction_gives_way_where_other_axes_leave_nothing() -> None:
    batch = Restriction((0,), allowed=frozenset({0}))
    assert batch.filter_strategies([(WHOLE,), (0,), (1,)]) == ((0,),)
    assert batch.filter_strategies([(WHOLE,), (1,), (-2,)]) == ((WHOLE,), (-2,))
    assert batch.filter_strategies([(1,)]) == ((1,),)
    heavy = Restriction((0, 1), forbidden=frozenset({0}))
    assert heavy.filter_strategies([(1, WHOLE), (1, 2), (2, 1), (0, 1)]) == ((1, 2), (2, 1))
    weighty = Restriction((0, 1), forbidden=frozenset({0}), preferred=frozenset({2}))
    assert weighty.filter_strategies([(1, WHOLE), (1, 2), (2, 1), (1, 1), (0, 2)]) == ((1, 2), (2, 1))
    summed = Restriction((0, 1), allowed=frozenset({0}), sums="preferred")
    assert summed.filter_strategies([(0, -2), (0, WHOLE), (1, 0)]) == ((0, -2),)
    reduced = Restriction((0, 1), allowed=frozenset({0}), sums="refused")
    assert reduced.filter_strategies([(0, -2), (0, WHOLE), (1, 0)]) == ((0, WHOLE),)
    light = Restriction((1,), forbidden=frozenset({0}), preferred=frozenset())
    assert light.filter_strategies([(0, 0), (0, WHOLE), (0, 1)]) == ((0, WHOLE), (0, 1))


def test_replicas_send_their_own_tokens_to_all_experts() -> None:
    # The rows behind a dispatch are of other operators than the batch, and are split by the tokens that they come from.
    module, inputs = sorted_experts()
    plan = autoshard.plan(module, {"x": 2}, (), inputs, hints={"": replicate()}, cluster="h100")
    assert {record.kind for record in plan.collectives if record.phase == "backward"} == {"all_reduce"}
    routed = {choice.strategy for choice in plan.choices if choice.operator.startswith("autoshard.")}
    assert routed == {"source on x"}


class Feed(nn.Module):
    """Two linear layers in a residual stream of sequences, with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(functional.gelu(self.up(self.norm(x))))).square().mean()


PINS = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}, "down.bias": R, "norm": R}


def fed(rest: Literal["whole", "batch", "sequence"], mesh: dict[str, int], **hints: object) -> ShardingPlan:
    data = (replicate("dp"),) if "dp" in mesh else ()
    asked = {"": (*data, split("tp", rest=rest)), **PINS, **hints}
    options = grouped({"cluster": fast_links(), "time_limit": 300.0, "hints": asked})
    return autoshard.plan(Feed(), mesh, (torch.randn(8, 4, 16),), **options)


@pytest.mark.parametrize(("rest", "norm"), [("whole", "whole"), ("batch", "dim0"), ("sequence", "dim1")])
def test_operators_follow_pinned_shards_and_the_rest_is_as_said(
    rest: Literal["whole", "batch", "sequence"], norm: str
) -> None:
    plan = fed(rest, {"tp": 2})
    assert strategies(plan, "aten.native_layer_norm", "norm") == {"tp": {norm}}
    forward = {choice.module: choice.strategy for choice in plan.choices if choice.operator == "aten.addmm"}
    assert forward["up"] == "j on tp"
    assert forward["down"] == "k on tp"
    assert strategies(plan, "aten.native_layer_norm_backward", "norm") == {"tp": {norm}}
    if rest != "batch":  # there the planner may change the split between the products
        assert strategies(plan, "aten.gelu", "") == {"tp": {"dim2"}}
    assert plan.hints[str(split("tp", rest=rest))] == "tp"


def test_primitives_of_one_module_are_for_different_axes() -> None:
    plan = fed("whole", {"dp": 2, "tp": 2})
    assert strategies(plan, "aten.native_layer_norm", "norm") == {"dp": {"dim0"}, "tp": {"whole"}}
    forward = {choice.module: choice.strategy for choice in plan.choices if choice.operator == "aten.addmm"}
    assert forward == {"up": "i.0 on dp, j on tp", "down": "i.0 on dp, k on tp"}
    assert plan.hints[""] == "replicate('dp'), split('tp', rest='whole')"
    shared = {"": (replicate("tp"), split("tp", rest="whole")), **PINS}
    with pytest.raises(HintError, match="have the mesh axis 'tp' in common"):
        autoshard.plan(Feed(), {"dp": 2, "tp": 2}, (torch.randn(8, 4, 16),), hints=shared)


def test_a_rest_needs_shards_and_a_sequence() -> None:
    x = torch.randn(8, 4, 16)
    with pytest.raises(
        HintError, match="along the shards that hints give their parameters on 'tp', and they give none"
    ):
        autoshard.plan(Feed(), {"tp": 2}, (x,), hints={"": split("tp", rest="whole")})
    linear, hints = nn.Sequential(OrderedDict(up=nn.Linear(16, 8))), {"": split(rest="sequence"), "up.weight": Shard(0)}
    with pytest.raises(HintError, match="no input has a batch, a sequence"):
        autoshard.plan(linear, {"tp": 2}, (torch.randn(8, 4, 2, 16),), hints=hints)
    with pytest.raises(HintError, match="choose 'whole', 'batch', 'sequence'"):
        split("tp", rest="heads")  # type: ignore[arg-type]
