"""Four processes on a mesh (pp=2, tp=2): each draws one device's numbers, and keeps those of its stage."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.checkpoint import install_hooks
from autoshard.runtime.materialize import materialize_module, materialize_stages
from autoshard.runtime.shards import distribute, local_of, replace_parameters
from autoshard.specs.spec import Spec
from tests.memory_tracker import Tracker
from tests.runtime.meshes import get_full, per_rank, simulated_mesh
from tests.training import fast_links, held_by_ranks
from tests.workers import Workers

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


def the_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def place_stage(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Parameters of a stage on the ranks that have it, some of them in shards."""
    texts = ("S(0)", "R", "S(0,f=2)")
    parameters = enumerate(stage.named_parameters())
    specs = {name: texts[n % 3] if one.ndim and one.shape[0] % 4 == 0 else "R" for n, (name, one) in parameters}
    replace_parameters(stage, {name: Spec.parse(text) for name, text in specs.items()}, mesh["tp"])


def assert_drawn(stage: nn.Module, expected: nn.Module) -> None:
    """Bit for bit what one device draws."""
    tensors = dict(expected.named_parameters(remove_duplicate=False)) | dict(expected.named_buffers())
    held = [*dict(stage.named_parameters(remove_duplicate=False)), *dict(stage.named_buffers())]
    assert held
    for name in held:
        assert torch.equal(get_full(stage, name), tensors[name].detach()), name


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(vocab_size=24, n_positions=12, n_embd=12, n_layer=2, n_head=2)
    return transformers.GPT2LMHeadModel(config)


def half_of_gpt2(model: nn.Module, index: int) -> nn.Module:
    """One of two stages, with copies of the parameters: the first has the vectors of tokens, the last the head."""
    stage = copy.deepcopy(model)
    if index == 0:
        del stage.lm_head, stage.transformer.ln_f
        delattr(stage.transformer.h, "1")
    else:
        del stage.transformer.wte, stage.transformer.wpe
        delattr(stage.transformer.h, "0")
    return stage


def draws_gpt2(placed: bool) -> list[str]:
    mesh = the_mesh()
    expected = gpt2()
    for module in expected.modules():
        module._is_hf_initialized = False
    torch.manual_seed(3)
    expected.init_weights()
    follow = torch.randn(4)
    with torch.device("meta"):
        model = gpt2()
    stage = half_of_gpt2(model, mesh.get_local_rank("pp"))
    if placed:
        place_stage(stage, mesh)
    parameters = list(stage.parameters())
    torch.manual_seed(3 + dist.get_rank())  # rank 0's counts
    materialize_stages(model, [stage], mesh, "pp")
    assert_drawn(stage, expected)
    assert torch.equal(torch.randn(4), follow)
    assert all(old is new for old, new in zip(parameters, stage.parameters(), strict=True))
    assert all(value.is_meta for value in model.parameters())
    return list(dict(stage.named_parameters()))


@pytest.mark.parametrize("placed", [True, False])
def test_stages_of_gpt2_get_the_numbers_of_one_device(four: Workers, placed: bool) -> None:
    names = four.run(draws_gpt2, placed)
    assert names[0] == names[1]
    assert "transformer.wte.weight" in names[0]
    assert "lm_head.weight" in names[2]  # the same
    assert set(names[0]) | set(names[2]) == dict(gpt2().named_parameters(remove_duplicate=False)).keys()


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8, 4))
        self.unused = nn.Parameter(torch.empty(4))
        self.register_buffer("steps", torch.empty(4))

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.unused)
        nn.init.normal_(self.weight)
        nn.init.zeros_(self.steps)
        with torch.no_grad():
            self.weight[2:4].mul_(self.unused)
            self.weight += torch.rand(self.weight.shape, device=self.weight.device)


class Last(nn.Module):
    """Its parameters depend on those of the module before."""

    def __init__(self, first: First) -> None:
        super().__init__()
        self.before = [first]
        self.weight = nn.Parameter(torch.empty(8, 4))
        self.replaced = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.empty(4))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(self.before[0].weight).add_(torch.randn(4))
        self.replaced = nn.Parameter(torch.randn(4) * self.before[0].unused.detach())
        self.table = torch.arange(4.0)


class Dependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = First()
        self.last = Last(self.first)


def stage_of(model: Dependent, index: int) -> nn.Module:
    """One of two stages, with its own copies of the parameters; nobody has `first.unused`."""
    stage = copy.deepcopy(model)
    delattr(stage, ("last", "first")[index])
    if index == 0:
        del stage.first.unused
    return stage


def draws_what_depends_on_others(kind: str) -> None:
    mesh = the_mesh()
    expected = Dependent()
    torch.manual_seed(3)
    expected.first.reset_parameters()
    expected.last.reset_parameters()
    with torch.device("meta"):
        model = Dependent()
    stage = stage_of(model, mesh.get_local_rank("pp"))
    if kind == "placed":
        place_stage(stage, mesh)
    if kind == "the model's own":
        stage = nn.Module()
        name = ("first", "last")[mesh.get_local_rank("pp")]
        setattr(stage, name, getattr(model, name))
    torch.manual_seed(3)
    materialize_stages(model, [stage], mesh, "pp")
    assert_drawn(stage, expected)
    if kind != "the model's own":
        assert all(value.is_meta for value in (*model.parameters(), *model.buffers()))


@pytest.mark.parametrize("kind", ["placed", "copies", "the model's own"])
def test_initialisers_may_read_what_other_stages_hold(four: Workers, kind: str) -> None:
    four.run(draws_what_depends_on_others, kind)


def peak_of_drawing(width: int) -> tuple[int, int, int]:
    """Bytes held at most; of this rank's parts; of a whole parameter."""
    mesh = the_mesh()
    model = nn.Sequential(*[nn.Linear(width, width, device="meta") for _ in range(8)])
    actual = range(4 * mesh.get_local_rank("pp"), 4 * mesh.get_local_rank("pp") + 4)
    stage = copy.deepcopy(model)
    for index in [index for index in range(8) if index not in actual]:
        delattr(stage, str(index))
    replace_parameters(stage, {name: Spec.parse("S(0)") for name, _ in stage.named_parameters()}, mesh["tp"])
    tracker = Tracker()
    with tracker:
        materialize_stages(model, [stage], mesh, "pp")
    parts = sum(parameter.to_local().nbytes for parameter in stage.parameters())
    return tracker.peak.bytes, parts, 4 * width * width


def test_no_rank_holds_more_than_its_parts_and_one_whole_parameter(four: Workers) -> None:
    for peak, parts, whole in four.run(peak_of_drawing, 128):
        assert parts == 2 * whole + 4 * 128 * 4 // 2
        assert parts + whole <= peak < parts + 1.7 * whole  # beside a whole one, the part that is cut from it


def forgets() -> str:
    mesh = the_mesh()
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(4, device="meta"))
    with pytest.raises(InputError, match="'weight' got memory, but no numbers") as caught:
        materialize_stages(model, [copy.deepcopy(model)], mesh, "pp")
    return str(caught.value)


def test_what_no_initialiser_fills_is_reported_on_every_rank(four: Workers) -> None:
    assert len(set(four.run(forgets))) == 1


def initialises() -> list[float]:
    mesh = the_mesh()
    model = nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Linear(4, 4))
    stage = copy.deepcopy(model)
    real = stage[1].weight.detach().clone()
    materialize_stages(
        model, [stage], mesh, "pp", init=lambda part: [nn.init.ones_(one) for one in part.parameters(False)]
    )
    assert torch.equal(stage[1].weight, real)  # it was no longer on the meta device
    return stage[0].weight.flatten().tolist()


def test_the_users_initialiser_goes_first(four: Workers) -> None:
    assert four.run(initialises) == [[1.0] * 16] * 4
