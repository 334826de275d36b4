"""A plan that was edited and saved again computes what one device does, or is refused before anything is changed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.capture.joint import JointGraph, capture
from autoshard.errors import PlanError
from autoshard.planner import module_planner
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache
from autoshard.plans import plan_data
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from tests.planner.steps import planner_of
from tests.random_plans import random_plan
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links
from tests.workers import Workers

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
MESH = {"a": 2, "b": 2}
Data = dict[str, Any]


class Block(nn.Module):
    """Attention and a norm over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        heads = (part.unflatten(-1, (4, 2)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        return x + self.out(self.norm(mixed.transpose(1, 2)).transpose(1, 2)).tanh()


class Net(nn.Module):
    """A block, and a loss beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = block(x)
        return x.square().mean(), x


def _net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def _x() -> Tensor:
    return torch.randn(4, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _data_of(graph: JointGraph, seed: int = 0, **asked: Any) -> Data:
    """A plan with random strategies: more of them are used than in plans that a planner finds."""
    return plan_data.to_data(random_plan(graph, MeshShape.of(MESH), seed, forced=0.5, **asked))


@pytest.fixture(scope="module")
def graph() -> JointGraph:
    return capture(_net(), (_x(),), {})


@pytest.fixture(scope="module")
def planner(graph: JointGraph) -> Planner:
    return planner_of(graph, MESH)


@pytest.fixture(scope="module")
def plain(graph: JointGraph) -> Data:
    return _data_of(graph)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of one process that stands for all: enough where nothing is to run."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    finally:
        dist.destroy_process_group()


def _saved_anew(data: Data) -> ShardingPlan:
    return ShardingPlan.from_json(plan_data.encode(data))


def _refused(
    data: Data, mesh: DeviceMesh, message: str = "", make: Callable[[], nn.Module] = _net, **options: Any
) -> None:
    """The plan is refused with `PlanError`, and the module is what it was."""
    module = make()
    before, kind, names = dict(module.named_parameters()), type(module), set(vars(module))
    with pytest.raises(PlanError, match=message):
        autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links(), plan=_saved_anew(data), **options)
    after = dict(module.named_parameters())
    assert after.keys() == before.keys()
    assert all(after[name] is before[name] and not isinstance(after[name], DTensor) for name in after)
    assert type(module) is kind
    assert set(vars(module)) == names


def _same(data: Data) -> None:
    """A step under the plan has one device's numbers."""
    module, alone, x = _net(), _net(), _x()
    expected = alone(x)
    expected[0].backward()
    with simulated_mesh(**MESH) as mesh:
        autoshard.parallelize(module, mesh, (x,), cluster=fast_links(), plan=_saved_anew(data))
        # One tensor for all ranks would take part in no collective of the simulation.
        outputs = module(LocalTensor({rank: x.clone() for rank in range(mesh.size())}))
        outputs[0].backward()
        ours = [*outputs, *(p.grad for p in module.parameters()), *module.buffers()]
        expected_value = [*expected, *(p.grad for p in alone.parameters()), *alone.buffers()]
        for one, other in zip(ours, expected_value, strict=True):
            for held in per_rank(gather_full_tensor(one) if isinstance(one, DTensor) else one.detach(), mesh).values():
                torch.testing.assert_close(held, other.detach(), **TOLERANCE)


def _operators(data: Data, text: str) -> list[str]:
    """Operators of the plan whose nodes have such a name."""
    result = [name for name in data["decisions"]["choices"] if name.startswith(text)]
    assert result, f"no {text} among {list(data['decisions']['choices'])}"
    return result


def _choose(text: str, *choices: object) -> Callable[[Data], None]:
    def edit(data: Data) -> None:
        data["decisions"]["choices"][_operators(data, text)[0]] = list(choices)

    return edit


def _rest(name: str, spec: str) -> Callable[[Data], None]:
    """A parameter lies otherwise, and the plan says so in both places."""

    def edit(data: Data) -> None:
        (place,) = (place for place, known_values in enumerate(data["placements"]) if known_values == name)
        data["decisions"]["rest"][f"primals_{place + 1}"] = spec
        data["placements"][name] = spec.split()

    return edit


def _swap(data: Data) -> None:
    placed = data["placements"]
    one, other = "blocks.0.qkv.weight", "blocks.0.out.weight"
    placed[one], placed[other] = placed[other], placed[one]


def _in(kind: str, name: str, value: object) -> Callable[[Data], None]:
    def edit(data: Data) -> None:
        data["decisions"][kind][name] = value

    return edit


def _set(part: str, name: str, value: object) -> Callable[[Data], None]:
    def edit(data: Data) -> None:
        data[part][name] = value

    return edit


def _output_in_shards(data: Data) -> None:
    data["decisions"]["outputs"]["output[1]"] = "S(0) S(2)"
    data["output_placements"]["output[1]"] = ["S(0)", "S(2)"]


def _every_hub(spec: str) -> Callable[[Data], None]:
    def edit(data: Data) -> None:
        hubs = data["decisions"]["hubs"]
        assert hubs
        data["decisions"]["hubs"] = dict.fromkeys(hubs, spec)

    return edit


def _first(kind: str) -> Callable[[Data], None]:
    def edit(data: Data) -> None:
        del data["decisions"][kind][next(iter(data["decisions"][kind]))]

    return edit


REFUSED: dict[str, tuple[Callable[[Data], object], str]] = {
    "a kind of decision is missing": (lambda data: data["decisions"].pop("hubs"), "decisions cannot be read"),
    "a choice is missing": (_first("choices"), "decides nothing of"),
    "a rest is missing": (_first("rest"), "decides nothing of"),
    "an output is missing": (_first("outputs"), "decides nothing of"),
    "a choice of an unknown node": (_in("choices", "mm_99", [-1, -1]), "mm_99"),
    "a rest of an unknown node": (_in("rest", "primals_99", "R R"), "primals_99"),
    "an output that is none": (_in("outputs", "logits", "R R"), "logits"),
    "a hub of an unknown node": (_in("hubs", "mm_99@forward", "R R"), "mm_99@forward"),
    "a factor that is not there": (_choose("addmm", 7, -1), "addmm"),
    "a linear set that is not there": (_choose("addmm", -9, -1), "addmm"),
    "too few axes": (_choose("addmm", -1), "addmm"),
    "too many axes": (_choose("addmm", -1, -1, -1), "addmm"),
    "a choice that is text": (_choose("addmm", "0", -1), "cannot be read"),
    "a choice that is a fraction": (_choose("addmm", 0.5, -1), "cannot be read"),
    "a choice that is true": (_choose("addmm", True, -1), "cannot be read"),
    "choices that are one number": (_in("choices", "addmm", 1), "cannot be read"),
    "a spec that is a number": (_in("outputs", "output[1]", 5), "cannot be read"),
    "a spec that is no spec": (_in("outputs", "output[1]", "X R"), "cannot be read"),
    "a parameter's dim that is not there": (_rest("blocks.0.qkv.weight", "R S(2)"), r"blocks\.0\.qkv\.weight"),
    "a partial parameter": (_rest("blocks.0.qkv.weight", "R P(sum)"), r"blocks\.0\.qkv\.weight"),
    "a strided shard of a stride that does not divide": (
        _rest("blocks.0.qkv.weight", "S(0,f=7) R"),
        r"blocks\.0\.qkv\.weight",
    ),
    "placements of two parameters swapped": (_swap, r"blocks\.0\.qkv\.weight lies as"),
    "placements without decisions": (
        _set("placements", "blocks.0.qkv.weight", ["R", "R"]),
        r"blocks\.0\.qkv\.weight lies as",
    ),
    "placements of a buffer": (
        _set("placements", "blocks.0.norm.running_mean", ["S(0)", "R"]),
        r"blocks\.0\.norm\.running_mean",
    ),
    "inputs that lie otherwise": (_set("input_placements", "x", ["S(0)", "R"]), "x lies as"),
    "outputs that lie otherwise": (_set("output_placements", "output[1]", ["S(0)", "R"]), "lies as"),
    "a sharded buffer": (_rest("blocks.0.norm.running_mean", "S(0) R"), r"blocks\.0\.norm\.running_mean"),
    "an output of a dim that is not there": (_in("outputs", "output[1]", "S(3) R"), "splits dim 3"),
    "a partial output": (_in("outputs", "output[1]", "P(sum) R"), "partial"),
    "an output of too few axes": (_in("outputs", "output[1]", "R"), "1 placements for the 2 axes"),
    "an output in blocks": (_in("outputs", "output[1]", "S(0,b=3) R"), "block"),
    "an output as the data says": (_in("outputs", "output[1]", "S(0,by=group) R"), ""),
    "hubs of too few axes": (_every_hub("R"), "1 placements for the 2 axes"),
    "hubs of a stride of nothing": (_every_hub("S(0,f=0) R"), ""),
    "hubs in blocks of nothing": (_every_hub("S(0,b=0) R"), ""),
    "hubs of dims that are not there": (_every_hub("S(9) R"), "splits dim 9"),
    "hubs from which no path leads": (_every_hub("S(0,by=group) R"), ""),
    "hubs of an unknown reduction": (_every_hub("P(most) R"), ""),
    "layers that are not there": (lambda data: data.update(recomputed=["blocks.7"]), r"recomputes 'blocks\.7'"),
    "layers run again of which nothing is decided": (
        lambda data: data.update(recomputed=["part 0"]),
        "decides nothing of",
    ),
    "shares of an axis that is not there": (_set("options", "shares", {"c": [1, 3]}), "axis 'c'"),
    "shares of two axes": (_set("options", "shares", {"a": [1, 3], "b": [1, 3]}), "shares"),
    "shares that are a list": (_set("options", "shares", [1, 3]), "shares"),
    "shares of nothing": (_set("options", "shares", {"a": [0, 0]}), "shares"),
    "shares of too few ranks": (_set("options", "shares", {"a": [4]}), "shares for 1 ranks"),
    "shares of what is not in shares": (_set("options", "shares", {"a": [1, 3]}), "shares"),
    "parts without shares": (_set("options", "parts", [["addmm", 0]]), "parts"),
    "parts of an unknown node": (
        lambda data: data["options"].update(shares={"a": [1, 3]}, parts=[["mm_99", 0]]),
        "mm_99",
    ),
    "parts of a loop that is not there": (
        lambda data: data["options"].update(shares={"a": [1, 3]}, parts=[["addmm", 9]]),
        "addmm",
    ),
    "parts that are no loops": (lambda data: data["options"].update(shares={"a": [1, 3]}, parts=[7]), "parts"),
    "parts that do not divide": (
        lambda data: data["options"].update(shares={"a": [1, 4]}, parts=[["addmm", 1]]),
        "parts",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_edited_plan_is_refused_before_anything_is_changed(
    name: str, graph: JointGraph, planner: Planner, plain: Data, mesh: DeviceMesh
) -> None:
    edit, message = REFUSED[name]
    data = copy.deepcopy(plain)
    edit(data)
    with (  # these take most of the time, and are the same for all
        mock.patch.object(module_planner, "capture_with_progress", return_value=(graph, 0.0)),
        mock.patch.object(PlannerCache, "of", return_value=planner),
    ):
        _refused(data, mesh, message)


def test_an_edited_plan_is_refused_on_all_ranks(two: Workers) -> None:
    two.run(_edited)


def _edited() -> None:
    module = nn.Linear(8, 8).double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    graph = capture(module, (_x(),), {})
    data = plan_data.to_data(random_plan(graph, MeshShape.of({"x": 2}), 0))
    data["decisions"]["choices"][next(iter(data["decisions"]["choices"]))] = [17]
    with pytest.raises(PlanError, match="the choice 17 on axis 'x'"):
        autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links(), plan=_saved_anew(data))
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    autoshard.parallelize(module, mesh, (_x(),), cluster=fast_links())  # the ranks still agree


def test_an_edited_plan_that_fits_computes_what_one_device_does(plain: Data) -> None:
    data = copy.deepcopy(plain)
    data["decisions"]["choices"]["tanh"] = [0, 1]
    _rest("blocks.0.out.weight", "S(1) R")(data)
    _output_in_shards(data)
    _every_hub("P(avg) R")(data)
    _same(data)


class Dropping(nn.Module):
    """Numbers drawn in a layer that is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(functional.dropout(self.up(x).tanh(), 0.5).tanh()).square().mean()


def test_what_is_run_again_draws_the_same_numbers(mesh: DeviceMesh) -> None:
    data = _data_of(capture(Dropping().double(), (_x(),), {}), recompute=1.0)
    choices = data["decisions"]["choices"]
    again = next(name for name in choices if name.startswith(("bernoulli", "rand", "native")) and "again" in name)
    choices[again] = [-1, -1] if choices[again] != [-1, -1] else [0, -1]
    _refused(data, mesh, f"{again} runs .* again and is split otherwise", lambda: Dropping().double())


class Layer(nn.Module):
    """A layer and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_a_plan_for_local_inputs_is_none_for_global_ones(mesh: DeviceMesh) -> None:
    def make() -> nn.Module:
        return Layer().double()

    local = {"inputs": "local", "input_placements": {"x": [Shard(0), Shard(1)]}}
    plan = autoshard.plan(make(), MESH, (_x(),), cluster=fast_links(), **local)
    data = plan_data.to_data(plan)
    _refused(data, mesh, 'was the plan made with inputs="local"', make)
    other = {"inputs": "local", "input_placements": {"x": [Shard(0), Shard(0)]}}
    graph = capture(make(), (_x(),), {})
    with mock.patch.object(module_planner, "capture_with_progress", return_value=(graph, 0.0)):
        _refused(data, mesh, "it is asked for as", make, **other)
