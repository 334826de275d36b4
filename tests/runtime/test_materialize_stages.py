"""Four processes on a mesh (pp=2, tp=2): each draws one device's numbers, and keeps those of its stage."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard.errors import InputError
from autoshard.runtime.materialize_stages import materialize_stages
from autoshard.runtime.shards import replace_parameters
from autoshard.specs import Spec
from tests.memory_tracker import Tracker
from tests.runtime.meshes import get_full
from tests.workers import Workers


def the_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))


def place(stage: nn.Module, mesh: DeviceMesh) -> None:
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
        place(stage, mesh)
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
        place(stage, mesh)
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
