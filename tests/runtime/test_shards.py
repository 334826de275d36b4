from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial

import autoshard
from autoshard.errors import InputError, MeshError, PlanError
from autoshard.runtime import shards
from autoshard.runtime.placed_tensor import place_parameters
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import true_local_shape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard
from tests.runtime.meshes import SPECS, get_full, one_device, per_rank, simulated_mesh

SHAPES = [(12, 10), (7, 5), (1, 9)]


def assert_lies(tensor: DTensor, value: torch.Tensor, spec: Spec) -> None:
    """`tensor` is `value` placed by `spec`, on every rank."""
    mesh = tensor.device_mesh
    assert tuple(tensor.placements) == spec.placements
    assert tensor.shape == value.shape
    for coordinate, local in per_rank(tensor, mesh).items():
        assert torch.equal(local, shard(value, spec, MeshShape.of(mesh), coordinate))


@pytest.mark.parametrize("shape", SHAPES)
def test_distribute_and_whole_agree_with_the_definition(shape: tuple[int, int]) -> None:
    value = torch.randn(shape)
    with simulated_mesh(a=2, b=3) as mesh:
        for spec in SPECS:
            tensor = shards.distribute(value.clone(), mesh, spec)
            assert_lies(tensor, value, spec)
            for back in per_rank(autoshard.full_tensor(tensor), mesh).values():
                assert torch.equal(back, value)


def test_what_has_no_shards_to_put_together_is_refused() -> None:
    with simulated_mesh(a=2) as mesh:
        partial = DTensor.from_local(torch.zeros(4), mesh, [Partial()])
        with pytest.raises(InputError, match=r"the tensor is partial .*: reduce it first"):
            autoshard.full_tensor(partial)
    with pytest.raises(InputError, match="of a DTensor, got a Tensor"):
        autoshard.full_tensor(torch.zeros(4))  # type: ignore[arg-type]


def test_every_redistribution_agrees_with_the_definition() -> None:
    value = torch.randn(12, 10)
    with simulated_mesh(a=2, b=3) as mesh:
        for source in SPECS[::5]:
            tensor = shards.distribute(value, mesh, source)
            for target in SPECS[::7]:
                assert_lies(shards.distribute(tensor, mesh, target), value, target)


def test_scalars_and_empty_tensors_are_distributed() -> None:
    with simulated_mesh(a=2) as mesh:
        for value in (torch.tensor(3.0), torch.empty(0, 4), torch.empty(4, 0)):
            tensor = shards.distribute(value, mesh, Spec.parse("S(0)" if value.ndim else "R"))
            assert all(torch.equal(back, value) for back in per_rank(shards.gather_full_tensor(tensor), mesh).values())


def test_a_replica_has_memory_of_its_own() -> None:
    value = torch.zeros(4)
    with simulated_mesh(a=2) as mesh:
        tensor = shards.distribute(value, mesh, Spec.parse("R"))
        shards.local_of(tensor).add_(1)
        assert all(torch.equal(local, torch.ones(4)) for local in per_rank(tensor, mesh).values())
    assert torch.equal(value, torch.zeros(4))


def test_a_meta_tensor_gets_a_meta_shard() -> None:
    with simulated_mesh(a=2, b=3) as mesh:
        for spec in SPECS:
            tensor = shards.distribute(torch.empty(7, 5, device="meta", requires_grad=True), mesh, spec)
            assert tensor.is_meta
            assert tensor.requires_grad
            assert tensor.is_leaf
            for coordinate, local in per_rank(tensor, mesh).items():
                assert local.is_meta
                assert tuple(local.shape) == true_local_shape((7, 5), spec, MeshShape.of(mesh), coordinate)


def test_wrapped_tensors_are_like_those_that_torch_makes() -> None:
    with simulated_mesh(a=2) as mesh:
        built = shards.wrap(torch.randn(2, 6), mesh, Spec.parse("S(-2,f=2)"), (4, 6), torch.float32)
        expected = DTensor.from_local(
            shards.local_of(built),
            mesh,
            Spec.parse("S(0,f=2)").placements,
            run_check=False,
            shape=(4, 6),
            stride=(6, 1),
        )
        assert built._spec == expected._spec
        assert not built.requires_grad
        like = shards.wrap_like(torch.randn(2, 6), built)
        assert like._spec == built._spec
        assert shards.local_of(like).shape == (2, 6)


def test_a_spec_that_does_not_fit_is_refused() -> None:
    with simulated_mesh(a=2) as mesh:
        with pytest.raises(ValueError, match="splits dim 2"):
            shards.distribute(torch.randn(2, 2), mesh, Spec.parse("S(2)"))
        with pytest.raises(ValueError, match="2 placements for the 1 axes"):
            shards.distribute(torch.randn(2, 2), mesh, Spec.parse("R R"))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.inner = nn.Linear(4, 6, bias=False)
        self.inner.weight = self.embedding.weight
        self.norm = nn.LayerNorm(4)
        self.norm.bias.requires_grad_(False)
        self.register_buffer("counter", torch.zeros(1))


REPLICATED = {name: Spec.parse("R R") for name in ("embedding.weight", "norm.weight", "norm.bias")}
SHARDED = {
    "inner.weight": Spec.parse("S(0,f=3) R"),
    "norm.weight": Spec.parse("S(0) S(0)"),
    "norm.bias": Spec.parse("R S(0)"),
}


def test_parameters_are_replaced_in_place() -> None:
    module = Tied()
    names = list(module.state_dict())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module.norm.weight.colour = "blue"
    module.norm.weight.grad = torch.arange(4.0)
    with simulated_mesh(a=2, b=2) as mesh:
        shards.replace_parameters(module, SHARDED, mesh)
        assert list(module.state_dict()) == names
        assert module.inner.weight is module.embedding.weight
        assert_lies(module.embedding.weight, before["embedding.weight"], SHARDED["inner.weight"])
        for name in ("norm.weight", "norm.bias"):
            assert_lies(module.get_parameter(name), before[name], SHARDED[name])
        assert isinstance(module.norm.weight, nn.Parameter)
        assert module.norm.weight.colour == "blue"
        assert_lies(module.norm.weight.grad, torch.arange(4.0), SHARDED["norm.weight"])
        assert module.norm.weight.requires_grad
        assert not module.norm.bias.requires_grad
        assert not isinstance(module.counter, DTensor)
        assert len(list(module.parameters())) == 3


def test_placing_again_keeps_objects_hooks_and_gradients() -> None:
    module = Tied()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    calls: list[str] = []
    module.norm.weight.register_hook(lambda gradient: calls.append("gradient"))
    module.norm.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    with simulated_mesh(a=2, b=2) as mesh:
        shards.replace_parameters(module, REPLICATED, mesh)
        parameters = list(module.parameters())
        module.norm.weight.sum().backward()
        assert calls == ["gradient", "accumulated"]
        shards.replace_parameters(module, SHARDED, mesh)
        assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
        assert_lies(module.inner.weight, before["embedding.weight"], SHARDED["inner.weight"])
        assert_lies(module.norm.weight.grad, torch.ones(4), SHARDED["norm.weight"])
        module.norm.weight.sum().backward()
        assert calls == ["gradient", "accumulated"] * 2
        assert_lies(module.norm.weight.grad, torch.full((4,), 2.0), SHARDED["norm.weight"])


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_an_optimizer_made_before_trains_on(optimizer_class: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.1} if optimizer_class is torch.optim.AdamW else {"lr": 0.1, "momentum": 0.9}
    plain = nn.Linear(4, 6, bias=False)
    placed = nn.Linear(4, 6, bias=False)
    placed.load_state_dict(plain.state_dict())
    gradients = [torch.randn(6, 4) for _ in range(3)]
    with simulated_mesh(a=2, b=2) as mesh:
        place_parameters(placed, {"weight": Spec.parse("R R")}, mesh)
        optimizers = [optimizer_class(module.parameters(), **options) for module in (plain, placed)]
        for gradient, text in zip(gradients, ["R R", "S(0,f=3) S(1)", "S(0) R"], strict=True):
            spec = Spec.parse(text)
            place_parameters(placed, {"weight": spec}, mesh)
            plain.weight.grad = gradient
            placed.weight.grad = shards.distribute(gradient, mesh, spec)
            for optimizer in optimizers:
                optimizer.step()
        for value in per_rank(get_full(placed, "weight"), mesh).values():
            torch.testing.assert_close(value, plain.weight.detach())


@pytest.mark.parametrize("text", ["S(0,f=3) R", "S(0,f=3) S(1)", "S(0,f=2) S(0)"])
@pytest.mark.parametrize("target", ["R R", "S(1) S(0)", "R S(0,f=3)"])
def test_parameters_of_strided_pieces_are_redistributed_with_their_gradients(text: str, target: str) -> None:
    """Torch's own redistribution is refused, or wrong, for some of them."""
    module = nn.Linear(4, 12, bias=False)
    value, factors = module.weight.detach().clone(), torch.randn(12, 4)
    with simulated_mesh(a=2, b=2) as mesh:
        place_parameters(module, {"weight": Spec.parse(text)}, mesh)
        placed = module.weight.redistribute(mesh, Spec.parse(target).placements)
        assert_lies(placed.detach(), value, Spec.parse(target))
        shards.redistribute(placed, Spec.parse("R R").placements).mul(
            shards.distribute(factors, mesh, Spec.parse("R R"))
        ).sum().backward()
        assert_lies(module.weight.grad, factors, Spec.parse(text))


def test_meta_parameters_are_placed_without_memory() -> None:
    with torch.device("meta"):
        module = Tied()
    with simulated_mesh(a=2, b=2) as mesh:
        shards.replace_parameters(module, REPLICATED, mesh)
        shards.replace_parameters(module, SHARDED, mesh)
        for value in per_rank(module.embedding.weight, mesh).values():
            assert value.is_meta
            assert value.shape == (3, 4)


@pytest.mark.parametrize(
    ("placements", "message"),
    [
        ({**REPLICATED, "norm.wieght": Spec.parse("R R")}, "no parameter. Close ones are norm.weight"),
        ({"embedding.weight": Spec.parse("R R"), "norm.bias": Spec.parse("R R")}, "no placement for .*'norm.weight'"),
        ({**REPLICATED, "inner.weight": Spec.parse("S(0) R")}, "one tied parameter"),
        ({**REPLICATED, "norm.bias": Spec.parse("S(1) R")}, "'norm.bias' can't be placed as S\\(1\\) R: .* 1 dims"),
    ],
)
def test_placements_that_do_not_fit_change_nothing(placements: dict[str, Spec], message: str) -> None:
    module = Tied()
    with simulated_mesh(a=2, b=2) as mesh:
        with pytest.raises(PlanError, match=message):
            shards.replace_parameters(module, placements, mesh)
        assert not any(isinstance(parameter, DTensor) for parameter in module.parameters())


def test_parameters_stay_on_their_mesh() -> None:
    module = nn.Linear(4, 4, bias=False)
    with simulated_mesh(a=2, b=2) as mesh:
        shards.replace_parameters(module, {"weight": Spec.parse("R R")}, mesh)
        other = init_device_mesh("cpu", (4, 1), mesh_dim_names=("a", "b"))
        with pytest.raises(MeshError, match="tensors stay on the mesh"):
            shards.replace_parameters(module, {"weight": Spec.parse("R R")}, other)


def test_whole_values_fill_tensors_in_place() -> None:
    module = Tied()
    with simulated_mesh(a=2, b=2) as mesh, torch.no_grad():
        shards.replace_parameters(module, SHARDED, mesh)
        value = torch.randn(6, 4)
        shards.fill(module.embedding.weight, value)
        shards.fill(module.counter, torch.ones(1))
        assert_lies(module.inner.weight, value, SHARDED["inner.weight"])
        assert all(torch.equal(v, value) for v in per_rank(get_full(module, "inner.weight"), mesh).values())
        assert torch.equal(module.counter, torch.ones(1))


def test_modules_that_watch_their_parameters_see_the_new_ones() -> None:
    module = nn.LSTM(4, 4)
    with simulated_mesh(a=2) as mesh:
        shards.replace_parameters(module, {name: Spec.parse("S(0)") for name, _ in module.named_parameters()}, mesh)
        assert all(isinstance(weight, DTensor) for weight in module._flat_weights)


class Buffered(nn.Module):
    """Buffers of every kind: tied, not persistent, counters, without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.arange(4.0))
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.inner = nn.Module()
        self.inner.register_buffer("scale", self.scale)
        self.register_buffer("absent", None)
        self.register_buffer("empty", torch.empty(3, device="meta"))


def test_buffers_move_to_the_device_of_the_mesh_as_module_to_moves_them() -> None:
    """The meta device stands for an accelerator: it is not the device on which the module was built."""
    module = Buffered()
    names, dtypes = list(module.state_dict()), [buffer.dtype for buffer in module.buffers()]
    with one_device("meta") as mesh:
        shards.place_buffers(module, mesh)
    assert {buffer.device.type for buffer in module.buffers()} == {"meta"}
    assert [buffer.dtype for buffer in module.buffers()] == dtypes
    assert list(module.state_dict()) == names
    assert module.inner.scale is module.scale
    assert "table" not in module.state_dict()
    assert module.norm.num_batches_tracked.dtype is torch.int64
    assert module.absent is None


def test_buffers_on_the_device_stay_the_same_objects_with_the_numbers_of_the_first_rank() -> None:
    module = Buffered()
    before = dict(module.named_buffers())
    with simulated_mesh(a=2) as mesh:
        shards.place_buffers(module, mesh)
    assert all(buffer is before[name] for name, buffer in module.named_buffers())
    assert torch.equal(module.scale, torch.arange(4.0))
    assert module.empty.is_meta
