from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.materialize import materialize_module
from autoshard.runtime.shards import distribute, local_of, replace_parameters
from autoshard.specs import Spec
from tests.runtime.meshes import get_full, per_rank, simulated_mesh
from tests.training import fast_links, held_by_ranks

TEXTS = ("S(0,f=2) S(0)", "S(0) R", "R S(0)", "R R", "S(0) S(0)")


def place(module: nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """Every parameter placed in some way, in turn."""
    specs = {}
    for number, (name, parameter) in enumerate(module.named_parameters()):
        specs[name] = Spec.parse(TEXTS[number % len(TEXTS)] if parameter.ndim else "R R")
    replace_parameters(module, specs, mesh)
    install_hooks(module)


def assert_same(module: nn.Module, expected: nn.Module, mesh: torch.distributed.DeviceMesh) -> None:
    """Bit for bit the same parameters and buffers, on every rank."""
    tensors = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    names = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers())
    assert list(names) == list(tensors)
    for name, value in tensors.items():
        for actual in per_rank(get_full(module, name), mesh).values():
            assert torch.equal(actual, value.detach()), name


def _layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.Embedding(8, 4, padding_idx=1),
        nn.LayerNorm((4, 2)),
        nn.Conv2d(4, 8, 3),
        nn.BatchNorm2d(4),
        nn.RMSNorm(4),
        nn.MultiheadAttention(8, 2),
        nn.LSTM(4, 6),
        nn.Bilinear(4, 4, 4),
        nn.GroupNorm(2, 4),
    )


def _reset(module: nn.Module) -> None:
    for child in module.children():
        _reset(child)
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()


def _unset(module: nn.Module) -> nn.Module:
    """The module with numbers that no initialiser would leave."""
    for tensor in module.state_dict().values():
        tensor.fill_(-7)
    return module


def test_layers_are_initialised_as_on_one_device() -> None:
    expected = _unset(_layers())
    torch.manual_seed(3)
    _reset(expected)
    follow = torch.randn(4)
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = _layers()
        place(module, mesh)
        parameters = list(module.parameters())
        torch.manual_seed(3)
        assert materialize_module(module, "cpu") is module
        assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
        assert_same(module, expected, mesh)
        for value in per_rank(torch.randn(4), mesh).values():
            assert torch.equal(value, follow)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=24, n_positions=12, n_embd=12, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def _llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [_gpt2, _llama])
def test_hugging_face_models_are_initialised_as_on_one_device(build: Callable[[], nn.Module]) -> None:
    expected = _unset(build())
    for module in expected.modules():
        module._is_hf_initialized = False
    torch.manual_seed(3)
    expected.init_weights()
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = build()
        place(module, mesh)
        torch.manual_seed(3)
        materialize_module(module, "cpu")
        assert_same(module, expected, mesh)
        assert module.get_output_embeddings().weight.requires_grad


class Peculiar(nn.Module):
    """Initialises in every way that a module may."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.scaled = nn.Parameter(torch.empty(6, 4))
        self.copied = nn.Parameter(torch.empty(6, 4))
        self.rows = nn.Parameter(torch.empty(6, 4))
        self.replaced = nn.Parameter(torch.empty(6, 4))
        self.trunc = nn.Parameter(torch.empty(8, 4))
        self.orthogonal = nn.Parameter(torch.empty(4, 4))
        self.frozen = nn.Parameter(torch.empty(()), requires_grad=False)
        self.register_buffer("frequencies", torch.empty(3), persistent=False)
        self.register_buffer("steps", torch.empty(2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.uniform_(-1, 1)
            self.scaled.normal_().clamp_(-1, 1).mul_(0.5).add_(self.weight, alpha=0.4).erfinv_()
            self.copied.copy_(self.scaled)
            self.copied[2:].zero_()
            self.rows.zero_()
            for row, weights in zip(self.rows, self.weight, strict=True):
                row.add_(weights * math.sqrt(self.rows.size(0)))
            self.rows.data[0] = 5
            self.trunc.data.exponential_()
            nn.init.trunc_normal_(self.trunc, std=2.0, a=-1, b=1)
            nn.init.orthogonal_(self.orthogonal)
            self.frozen.fill_(2)
            self.steps[0] = 1
            self.steps[1] = 2
        self.frequencies = 10.0 ** -torch.arange(3.0)
        self.replaced = nn.Parameter(torch.randn(6, 4))


def test_any_way_to_initialise_is_followed() -> None:
    torch.manual_seed(3)
    expected = Peculiar()
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = Peculiar()
        place(module, mesh)
        parameters = list(module.parameters())
        torch.manual_seed(3)
        materialize_module(module)
        assert_same(module, expected, mesh)
        assert all(old is new for old, new in zip(parameters, module.parameters(), strict=True))
        assert not module.frozen.requires_grad
        assert module.weight.requires_grad
        assert "frequencies" not in module.state_dict()


def test_the_users_initialiser_is_called_for_every_module_and_goes_first() -> None:
    seen = []

    def init(module: nn.Module) -> None:
        seen.append(type(module))
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 4)

    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
        place(module, mesh)
        materialize_module(module, "cpu", init)
        assert seen == [nn.Linear, nn.LayerNorm, nn.Sequential]
        for parameter in module.parameters():
            assert all((local == 4).all() for local in per_rank(parameter, mesh).values())


def test_what_is_real_already_is_left_alone() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta"))
    before = module[0].weight.detach().clone()
    with simulated_mesh(a=2, b=2) as mesh:
        place(module, mesh)
        materialize_module(module)
        assert all(torch.equal(value, before) for value in per_rank(get_full(module, "0.weight"), mesh).values())
        assert not module[1].weight.is_meta


def test_hooks_and_attributes_survive() -> None:
    calls: list[Tensor] = []
    with simulated_mesh(a=2, b=2) as mesh:
        module = nn.Linear(4, 4, device="meta")
        place(module, mesh)
        module.weight.colour = "blue"
        module.weight.register_post_accumulate_grad_hook(calls.append)
        module.weight.register_hook(calls.append)
        materialize_module(module)
        assert module.weight.colour == "blue"
        module.weight.sum().backward()
        assert len(calls) == 2
        assert calls[1] is module.weight


def test_shards_alone_take_memory() -> None:
    sizes: list[int] = []

    def init(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            sizes.extend(local.numel() for local in per_rank(parameter, mesh).values())
            nn.init.zeros_(parameter)

    with simulated_mesh(a=4) as mesh:
        module = nn.Linear(16, 16, bias=False, device="meta")
        replace_parameters(module, {"weight": Spec.parse("S(0)")}, mesh)
        materialize_module(module, init=init)
        assert sizes == [64] * 4
        for local in per_rank(module.weight, mesh).values():
            assert local.untyped_storage().nbytes() == 64 * 4


class Forgetful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.other = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        assert self.other.shape == self.table.shape


def test_what_no_initialiser_fills_is_reported() -> None:
    with simulated_mesh(a=2, b=2) as mesh:
        with torch.device("meta"):
            module = Forgetful()
        place(module, mesh)
        with pytest.raises(InputError, match="'other' and 1 more got memory, but no numbers"):
            materialize_module(module)


def test_only_parallelised_modules_are_materialized_and_only_on_their_mesh() -> None:
    with pytest.raises(InputError, match=r"'weight' is no DTensor: call autoshard\.parallelize"):
        materialize_module(nn.Linear(2, 2, device="meta"))
    with pytest.raises(InputError, match="no parameters"):
        materialize_module(nn.ReLU())
    with simulated_mesh(a=2, b=2) as mesh:
        module = nn.Linear(4, 4, device="meta")
        place(module, mesh)
        with pytest.raises(InputError, match=r"'cuda'.*mesh of 'cpu' devices"):
            materialize_module(module, "cuda")
        assert module.weight.is_meta


def test_a_materialized_module_trains_and_loads() -> None:
    with simulated_mesh(a=2, b=2) as mesh:
        module = nn.Linear(4, 4, device="meta")
        place(module, mesh)
        optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
        materialize_module(module, init=lambda part: [nn.init.ones_(parameter) for parameter in part.parameters()])
        for parameter in module.parameters():
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute(torch.ones(parameter.shape), mesh, Spec(tuple(parameter.placements)))
        optimizer.step()
        assert all((local == 0).all() for p in module.parameters() for local in per_rank(p, mesh).values())
        module.load_state_dict({"weight": torch.eye(4), "bias": torch.ones(4)})
        assert all(torch.equal(value, torch.eye(4)) for value in per_rank(get_full(module, "weight"), mesh).values())
        assert local_of(module.bias).requires_grad is False


class Sparse(nn.Module):
    """Makes a constant in `forward`, on the device of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.relu(y - y.mean(-1, keepdim=True) * torch.tensor(0.5, dtype=x.dtype, device=x.device).exp())


def test_constants_of_forward_are_there_for_a_module_of_the_meta_device() -> None:
    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.device("meta"):
        module, example = Sparse(), torch.empty_like(x, device="meta")
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, (example,), cluster=fast_links())
        autoshard.materialize(module, "cpu")
        alone = Sparse()
        alone.load_state_dict(
            {name: next(iter(per_rank(get_full(module, name), mesh).values())) for name in alone.state_dict()}
        )
        for held in held_by_ranks(module(x).detach()):
            torch.testing.assert_close(held, alone(x).detach())
