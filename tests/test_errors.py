"""Bad input: an error of one class hierarchy whose text helps, and nothing changed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import CellType, FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import autoshard
from autoshard.errors import (
    AutoshardError,
    BudgetError,
    CaptureError,
    HintError,
    InputError,
    MeshError,
    PlanError,
    RuleError,
    warn_caller,
)
from autoshard.runtime import arguments
from tests.option_groups import grouped
from tests.releases import skip_without


class Mlp(nn.Module):
    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(16, inner)
        self.down = nn.Linear(inner, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


class Branching(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x = x * self.up.weight.sum()
        if x.sum() > 0:  # depends on parameters
            return self.up(x).sum()
        return self.down(self.up(x)).sum()


class Counting(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)[: int(x.sum().item())].sum()


class Reducing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        dist.all_reduce(hidden)
        return self.down(hidden).sum()


class Choosing(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return hidden[hidden > 0].sum()


class Inverting(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.lu_factor(x @ x.T + self.up(x).sum())[0].sum()


class Scaling(Mlp):
    """Holds a tensor that is neither parameter nor buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(16, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class Pinning(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return autoshard.shard(self.up(x), Shard(7), Replicate()).sum()


X = torch.randn(8, 16)


@pytest.fixture
def mesh() -> DeviceMesh:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture(scope="module")
def plan() -> autoshard.ShardingPlan:
    return autoshard.plan(Mlp(), {"dp": 2, "tp": 2}, (X,), cluster="cpu")


def state(module: nn.Module) -> list[Any]:
    """All that `parallelize` may change, in a form that compares by identity of tensors."""
    found: list[Any] = []
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            if isinstance(value, dict):
                found.append((name, key, [(entry, id(held)) for entry, held in value.items()]))
            else:
                found.append((name, key, repr(value)))
    return found


def refused(error: type[AutoshardError], texts: list[str], module: nn.Module, *args: Any, **kwargs: Any) -> str:
    """Make sure that `parallelize` refuses, says these texts, and leaves the module as it was."""
    before, grads = state(module), {name: p.requires_grad for name, p in module.named_parameters()}
    numbers = {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}
    with pytest.raises(error) as caught:
        autoshard.parallelize(module, *args, **grouped(kwargs))
    for text in texts:
        assert text in str(caught.value)
    assert state(module) == before
    assert "forward" not in vars(module)
    assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert {name: p.requires_grad for name, p in module.named_parameters()} == grads
    assert all(torch.equal(module.get_parameter(name), value) for name, value in numbers.items())
    return str(caught.value)


def test_all_errors_are_of_one_hierarchy() -> None:
    for error in (BudgetError, CaptureError, HintError, InputError, MeshError, PlanError, RuleError):
        assert issubclass(error, AutoshardError)
        assert issubclass(error, ValueError)
        assert getattr(autoshard, error.__name__) is error


def test_a_mesh_larger_than_the_world(mesh: DeviceMesh) -> None:
    large = DeviceMesh("cpu", torch.arange(8).view(2, 4), mesh_dim_names=("dp", "tp"), _init_backend=False)
    refused(MeshError, ["dp=2, tp=4", "8 devices", "4 ranks", "start 8 processes"], Mlp(), large, (X,))


def test_a_rank_that_is_not_on_the_mesh(mesh: DeviceMesh) -> None:
    other = DeviceMesh("cpu", torch.tensor([1, 2]), mesh_dim_names=("tp",), _init_backend=False)
    refused(MeshError, ["rank 0 is not on the mesh tp=2", "[1, 2]"], Mlp(), other, (X,))


def test_devices_without_a_backend(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    other = DeviceMesh("meta", torch.arange(4), mesh_dim_names=("tp",))
    refused(MeshError, ["axis 'tp'", "'meta' devices", "fake for cuda", "register a backend"], Mlp(), other, (X,))
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    texts = [
        "axis 'dp'",
        "'cpu' devices",
        "nccl for cuda",
        'init_process_group("cuda:nccl,cpu:gloo")',
        "'cuda' devices",
    ]
    refused(MeshError, texts, Mlp(), mesh, (X,))


def test_numbers_that_the_devices_do_not_have(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "has_float64", lambda device_type: False)
    refused(InputError, ["up.weight is torch.float64", "'cpu' devices", "float()"], Mlp().double(), mesh, (X.double(),))
    assert not arguments.has_float64("mps")


@pytest.mark.parametrize("wrong", [{"tp": 2}, None, 4])
def test_what_is_no_mesh(mesh: DeviceMesh, wrong: object) -> None:
    refused(MeshError, ["DeviceMesh", type(wrong).__name__, "autoshard.plan"], Mlp(), wrong, (X,))


def test_no_process_group(mesh: DeviceMesh) -> None:
    dist.destroy_process_group()
    refused(MeshError, ["init_process_group", "torchrun"], Mlp(), mesh, (X,))


@pytest.mark.parametrize(("described", "text"), [({}, "at least one axis"), ({"dp": 0}, "'dp' has size 0"), (4, "int")])
def test_a_description_that_is_no_mesh(described: Any, text: str) -> None:
    with pytest.raises(MeshError, match=text):
        autoshard.plan(Mlp(), described, (X,))


def test_a_plan_of_another_model(mesh: DeviceMesh, plan: autoshard.ShardingPlan) -> None:
    texts = ["does not fit", "up.weight (planned (32, 16), here (64, 16))", "autoshard.plan"]
    refused(PlanError, texts, Mlp(64), mesh, (X,), plan=plan)
    refused(PlanError, texts, Mlp(64), mesh, plan=plan)
    refused(PlanError, ["the model lacks up.weight"], nn.Linear(16, 16), mesh, (X,), plan=plan)


def test_a_plan_of_another_mesh(mesh: DeviceMesh, plan: autoshard.ShardingPlan) -> None:
    line = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for examples in ((X,), ()):
        refused(PlanError, ["made for the mesh dp=2, tp=2; this mesh is tp=4"], Mlp(), line, examples, plan=plan)


def test_a_plan_for_other_inputs(mesh: DeviceMesh, plan: autoshard.ShardingPlan) -> None:
    refused(PlanError, ["the captured graph does not", "other example inputs"], Mlp(), mesh, (X[:4],), plan=plan)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (lambda text: text[: len(text) // 2], "is cut short or damaged"),
        (lambda text: "", "is cut short or damaged"),
        (lambda text: text.replace('"R"', '"S(0)"', 1), "was edited or damaged since it was saved"),
        (lambda text: text.replace('"version": 3', '"version": 99'), "version 99 of the plan format"),
        (lambda text: "[1, 2]", "is not a sharding plan"),
    ],
)
def test_a_plan_file_that_was_harmed(
    plan: autoshard.ShardingPlan, tmp_path: Path, harm: Callable[[str], str], text: str
) -> None:
    path = tmp_path / "model.plan.json"
    plan.save(path)
    assert autoshard.ShardingPlan.load(path) == plan
    path.write_text(harm(path.read_text()))
    with pytest.raises(PlanError, match=text) as caught:
        autoshard.ShardingPlan.load(path)
    assert str(path) in str(caught.value)


def test_a_plan_file_that_is_not_there_or_no_text(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        autoshard.ShardingPlan.load(tmp_path / "absent.json")
    (tmp_path / "pickle").write_bytes(b"\x80\x04\x95")
    with pytest.raises(PlanError, match="cannot be read"):
        autoshard.ShardingPlan.load(tmp_path / "pickle")


def test_a_path_in_the_place_of_a_plan(mesh: DeviceMesh) -> None:
    refused(PlanError, ["ShardingPlan.load"], Mlp(), mesh, (X,), plan="model.plan.json")


def test_a_budget_that_cannot_be_met_names_the_smallest_that_can(mesh: DeviceMesh) -> None:
    said = refused(BudgetError, ["no plan fits in 1000 B", "dp=2, tp=2"], Mlp(), mesh, (X,), memory_limit=1000)
    found = re.search(r"memory_limit to (\d+) bytes", said)
    assert found is not None
    smallest = int(found[1])
    refused(BudgetError, [f"memory_limit to {smallest} bytes"], Mlp(), mesh, (X,), memory_limit=smallest - 1)
    model = autoshard.parallelize(Mlp(), mesh, (X,), memory_limit=smallest)
    assert model.sharding_plan.memory.peak <= smallest


@pytest.mark.parametrize(("amount", "text"), [(0, "at least one byte"), ("24", "no unit"), ("much", "not an amount")])
def test_a_budget_that_is_none(mesh: DeviceMesh, amount: Any, text: str) -> None:
    refused(BudgetError, [text], Mlp(), mesh, (X,), memory_limit=amount)


@pytest.mark.parametrize(
    ("module", "line", "advice"),
    [
        (Branching, "if x.sum() > 0:", "torch.where"),
        (Counting, "int(x.sum().item())", "plain Python argument"),
        (Choosing, "hidden[hidden > 0]", "torch.where in place of boolean indexing"),
    ],
)
def test_control_flow_that_depends_on_data(mesh: DeviceMesh, module: type[Mlp], line: str, advice: str) -> None:
    said = refused(CaptureError, [line, advice], module(), mesh, (X,))
    assert re.search(r"test_errors\.py(:|\", line )\d+", said)
    assert "unhinted" not in said


def test_errors_of_capture_come_without_what_torch_writes_on_the_way(capfd: pytest.CaptureFixture[str]) -> None:
    x = torch.randn(4, 16)
    for module, example in ((Branching(), x), (Mlp(), x.T)):
        with pytest.raises(CaptureError):
            autoshard.plan(module, {"tp": 2}, (example,))
    assert capfd.readouterr() == ("", "")


def test_a_collective_in_forward(mesh: DeviceMesh) -> None:
    refused(CaptureError, ["all_reduce", "dist.all_reduce(hidden)", "one device"], Reducing(), mesh, (X,))


def test_a_collective_in_forward_without_a_process_group() -> None:
    with pytest.raises(CaptureError, match=r"dist.all_reduce\(hidden\).*leave them out of forward"):
        autoshard.plan(Reducing(), {"tp": 2}, (torch.randn(4, 16),))


def test_an_operator_with_an_effect_besides_its_results(mesh: DeviceMesh) -> None:
    skip_without("effects of operators in graphs")
    refused(CaptureError, ["_linalg_check_errors", "torch.linalg.inv_ex"], Inverting(), mesh, (X,))


def test_parameters_on_two_devices(mesh: DeviceMesh) -> None:
    for examples in ((X,), ()):
        model = Mlp()
        model.down.to("meta")
        refused(CaptureError, ["up.weight on cpu", "down.weight on meta", "one device"], model, mesh, examples)


@pytest.mark.parametrize(
    ("hints", "texts"),
    [
        ({"dwon.*": {"tp": Shard(0)}}, ["'dwon.*'", "matches no parameter and no module", "down"]),
        ({"up.weight": {"pipeline": Shard(0)}}, ["'up.weight'", "'pipeline'", "dp=2, tp=2"]),
        ({"up.weight": {"tp": Shard(5)}}, ["'up.weight'", "dim 5", "2 dims", "(32, 16)"]),
        ({"up.*": {"tp": Shard(0)}, "*.weight": {"tp": Replicate()}}, ["contradict", "'up.*'", "'*.weight'", "'tp'"]),
        ({"up.weight": {"tp": Partial()}}, ["'up.weight'", "cannot be Partial"]),
        ({"up.weight": (Shard(0),)}, ["'up.weight'", "1 placements", "2 axes"]),
        ({"up.weight": "column"}, ["'up.weight'", "'column'", "pins no placement"]),
        ("up.weight", ["'up.weight'", "mapping"]),
    ],
)
def test_hints_that_do_not_fit(mesh: DeviceMesh, hints: Any, texts: list[str]) -> None:
    refused(HintError, texts, Mlp(), mesh, (X,), hints=hints)


def test_a_dim_smaller_than_the_axis_that_must_shard_it(mesh: DeviceMesh) -> None:
    texts = ["'up.weight'", "dim 0 of up.weight, of size 1, over tp=2"]
    refused(HintError, texts, Mlp(1), mesh, (X,), hints={"up.weight": {"tp": Shard(0)}})
    both = ["of size 3, over dp=2 and tp=2", "4 parts"]
    refused(HintError, both, Mlp(3), mesh, (X,), hints={"up.weight": Shard(0)})


def test_an_activation_pinned_to_a_dim_that_it_has_not(mesh: DeviceMesh) -> None:
    refused(HintError, ["S(7)", "2 dims"], Pinning(), mesh, (X,))


def test_parallelize_twice(mesh: DeviceMesh) -> None:
    for examples in ((X,), ()):
        model = autoshard.parallelize(Mlp(), mesh, examples)
        before = state(model)
        with pytest.raises(PlanError, match="parallelised already: parallelize works in place, once"):
            autoshard.parallelize(model, mesh, examples)
        with pytest.raises(PlanError, match="parameter weight is a DTensor already"):
            autoshard.parallelize(model.up, mesh, examples)
        assert state(model) == before
        assert torch.isfinite(model(X))


def test_a_part_of_the_module_that_is_parallelised(mesh: DeviceMesh) -> None:
    model = Mlp()
    autoshard.parallelize(model.up, mesh, (X,))
    before = state(model)
    with pytest.raises(PlanError, match="up is parallelised already"):
        autoshard.parallelize(model, mesh, (X,))
    assert state(model) == before


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        ({"example_args": X}, ["example_args", "Tensor", "example_args=(x,)"]),
        ({"example_args": (), "example_kwargs": (X,)}, ["example_kwargs", "mapping", "tuple"]),
    ],
)
def test_examples_that_are_no_arguments(mesh: DeviceMesh, options: dict[str, Any], texts: list[str]) -> None:
    refused(InputError, texts, Mlp(), mesh, **options)
    with pytest.raises(InputError, match=texts[0]):
        autoshard.plan(Mlp(), mesh, **options)


def test_what_is_no_module(mesh: DeviceMesh) -> None:
    for call in (autoshard.parallelize, autoshard.plan):
        with pytest.raises(InputError, match=r"torch\.nn\.Module, got function"):
            call(lambda x: x, mesh, (X,))


def test_what_spreads_a_module_in_its_own_way(mesh: DeviceMesh) -> None:
    wrapped = nn.parallel.DistributedDataParallel(Mlp())
    for module, name in ((wrapped, "the module"), (nn.Sequential(wrapped), "0")):
        with pytest.raises(InputError, match=f"{name} is wrapped in DistributedDataParallel.*attribute `module`"):
            autoshard.parallelize(module, mesh, (X,))


@pytest.mark.parametrize(
    ("options", "error", "texts"),
    [
        ({"method": "fast"}, PlanError, ["'fast'", "eliminate", "ilp"]),
        ({"inputs": "sharded"}, PlanError, ["'sharded'", '"global"', '"local"']),
        ({"output_placements": "whole"}, PlanError, ["'whole'", '"planned"']),
        ({"output_placements": {"logits": Shard(0)}}, HintError, ["no output 'logits'"]),
        ({"inputs": "local", "input_placements": {"y": Shard(0)}}, HintError, ["no input 'y'", "x"]),
        ({"input_placements": {"x": Shard(0)}}, PlanError, ['inputs="local"']),
        ({"time_limit": 0}, PlanError, ["time_limit=0"]),
        ({"optimizer_bytes_per_element": -1}, PlanError, ["optimizer_bytes_per_element=-1", "Adam"]),
        ({"cluster": "h1000"}, MeshError, ["'h1000'", "h100", "cpu"]),
    ],
)
def test_options_that_do_not_exist(
    mesh: DeviceMesh, options: dict[str, Any], error: type[AutoshardError], texts: list[str]
) -> None:
    refused(error, texts, Mlp(), mesh, (X,), **options)


def test_examples_that_the_module_does_not_take(mesh: DeviceMesh) -> None:
    refused(CaptureError, ["too many positional arguments", "example_args"], Mlp(), mesh, (X, X))
    refused(CaptureError, ["missing a required argument: 'x'", "example_args"], Mlp(), mesh, example_kwargs={"y": X})
    refused(CaptureError, ["[8, 17] X [16, 32]"], Mlp(), mesh, (torch.randn(8, 17),))


def test_a_bad_first_call_leaves_the_module_ready_for_a_good_one(mesh: DeviceMesh) -> None:
    model = autoshard.parallelize(Mlp(), mesh)
    before = state(model)
    with pytest.raises(CaptureError, match="missing a required argument"):
        model()
    assert state(model) == before
    assert model.sharding_plan is None
    assert torch.isfinite(model(X))
    assert model.sharding_plan is not None


def test_a_bad_later_call_leaves_the_programs_that_there_are(mesh: DeviceMesh) -> None:
    model = autoshard.parallelize(Mlp(), mesh, (X,))
    with pytest.raises(CaptureError, match=r"\[8, 17\] X \[16, 32\]"):
        model(torch.randn(8, 17))
    assert torch.isfinite(model(X))


def test_a_plain_tensor_attribute_without_numbers(mesh: DeviceMesh) -> None:
    refused(InputError, ["scale", "register it as a buffer"], Scaling().to("meta"), mesh, (X,))


def test_a_call_without_numbers(mesh: DeviceMesh) -> None:
    model = autoshard.parallelize(Mlp().to("meta"), mesh, (X,))
    with pytest.raises(InputError, match=r"parameter up\.weight is on the meta device.*materialize"):
        model(X)
    autoshard.materialize(model)
    with pytest.raises(InputError, match="input x is on the meta device"):
        model(X.to("meta"))
    assert torch.isfinite(model(X))


def test_warnings_point_at_the_line_that_called_the_library() -> None:
    def inside(depth: int) -> None:
        if depth:
            ours["inside"](depth - 1)
        else:
            warn_caller("late")

    ours: dict[str, Any] = {"__name__": "autoshard.somewhere", "warn_caller": warn_caller}
    ours["ours"] = ours
    ours["inside"] = FunctionType(inside.__code__, ours, closure=(CellType(ours),))
    for depth in (0, 3):
        with pytest.warns(UserWarning, match="late") as caught:
            ours["inside"](depth)
        assert caught[0].filename == __file__
