"""Methods of a parallelised module, and submodules called by themselves, against one device."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F

import autoshard
from autoshard.errors import InputError
from autoshard.runtime.shards import gather_full_tensor
from tests.training import fast_links
from tests.workers import Workers

TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}
HINTS = {"encoder.0.weight": Shard(0), "encoder.2.weight": Shard(1), "decoder.weight": Shard(1)}


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4, bias=False))
        self.norm = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, 8)
        self.encoded = 0

    def encode(self, x: Tensor, scale: float = 1.0, *, shift: Tensor | None = None) -> Tensor:
        self.encoded += 1
        codes = self.norm(self.encoder(x)) * scale
        return codes if shift is None else codes + shift

    def decode(self, codes: Tensor) -> dict[str, Tensor]:
        return {"decoded": self.decoder(codes)}

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.decode(self.encode(x))["decoded"], x)

    def score(self, x: Tensor) -> Tensor:
        return -self(x)


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def _x(rows: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _models(**options: Any) -> tuple[Autoencoder, Autoencoder]:
    """An autoencoder in shards, and one on one device."""
    torch.manual_seed(0)
    alone = Autoencoder().double()
    model = copy.deepcopy(alone)
    autoshard.parallelize(model, _mesh(), (_x(6),), hints=HINTS, cluster=fast_links(), **options)
    assert isinstance(model.encoder[0].weight, DTensor)
    assert model.encoder[0].weight.placements == (Shard(0),)
    return model, alone


def _same(ours: Tensor | None, expected: Tensor | None) -> None:
    if expected is None:
        assert ours is None
        return
    assert ours is not None
    whole = gather_full_tensor(ours) if isinstance(ours, DTensor) else ours
    torch.testing.assert_close(whole.detach(), expected.detach(), **TOLERANCE)


def _same_state(model: nn.Module, alone: nn.Module) -> None:
    """Gradients, then parameters and buffers, which have the names of one device."""
    for (name, ours), (expected_name, expected) in zip(model.named_parameters(), alone.named_parameters(), strict=True):
        assert name == expected_name
        _same(ours.grad, expected.grad)
    state, expected_state = model.state_dict(), alone.state_dict()
    assert list(state) == list(expected_state)
    for name, expected in expected_state.items():
        _same(state[name], expected)


class _Log(logging.Handler):
    """The programs that are made, as the first rank logs them."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "was made in" in record.getMessage():
            self.lines.append(record.getMessage())

    def __enter__(self) -> _Log:
        self._level = logging.getLogger("autoshard").level
        logging.getLogger("autoshard").addHandler(self)
        logging.getLogger("autoshard").setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("autoshard").removeHandler(self)
        logging.getLogger("autoshard").setLevel(self._level)


def _methods() -> list[str]:
    model, alone = _models()
    parameters = dict(model.named_parameters())
    autoshard.register_forward_method(model, "encode")
    autoshard.register_forward_method(model, "decode")
    shift = torch.arange(4, dtype=torch.float64)
    with _Log() as log:
        for each in (model, alone):
            for _ in range(2):
                (each.encode(_x(6)) ** 2).sum().backward()
                (each.encode(_x(4, 1), 2.0, shift=shift).exp()).sum().backward()
            # Through two programs, and the module itself beside them.
            each.decode(each.encode(x=_x(6, 2)))["decoded"].square().mean().backward()
            each(_x(6, 3)).backward()
        _same_state(model, alone)
        with torch.no_grad():
            _same(model.encode(_x(6)), alone.encode(_x(6)))
        model.eval()
        alone.eval()
        for each in (model, alone):
            each.zero_grad()
            each.encode(_x(6)).sum().backward()
        _same(model.encode(_x(6)), alone.encode(_x(6)))
    _same_state(model, alone)
    assert model.encoded == alone.encoded
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    return log.lines


def test_methods_give_the_numbers_of_one_device(two: Workers) -> None:
    lines, others = two.run(_methods)
    # Each kind of call once: other shapes and values, a keyword, no gradients, evaluation.
    assert [line.partition(":")[0] for line in lines].count("Autoencoder.encode") == 5
    assert "Autoencoder.encode: program 2, for x (4, 8), shift (4,), was made" in lines[1]
    assert [line.partition(":")[0] for line in lines].count("Autoencoder.decode") == 1
    assert others == []


def _registered_parts() -> None:
    model, alone = _models()
    for call in (lambda: model.encoder(_x(6)), lambda: model.encode(_x(6)), lambda: model.encoder(input=_x(6))):
        with pytest.raises(InputError, match=r"encoder \(Sequential\) is called .*\(model, 'encoder.forward'\)"):
            call()
    whole = distribute_tensor(_x(6), model.encoder[0].weight.device_mesh)
    _same(model.encoder(whole).full_tensor(), alone.encoder(_x(6)))
    with implicit_replication():
        _same(model.encoder(_x(6)).full_tensor(), alone.encoder(_x(6)))
    for each in (model, alone):
        # Around the program where the encoder is called by itself, and in the program of other calls.
        each.encoder.register_forward_hook(lambda part, args, result: result * 2)
    autoshard.register_forward_method(model, "encoder.forward")
    autoshard.register_forward_method(model, "score")
    x, expected_x = _x(6).requires_grad_(), _x(6).requires_grad_()
    for each, given in ((model, x), (alone, expected_x)):
        each.encoder(given).square().sum().backward()
        each.score(given).backward()
        each(given).backward()
    _same(x.grad, expected_x.grad)
    _same_state(model, alone)
    # A new submodule is no longer the one that was registered.
    model.decoder, alone.decoder = nn.Linear(4, 8).double(), nn.Linear(4, 8).double()
    alone.decoder.load_state_dict(model.decoder.state_dict())
    autoshard.register_forward_method(model, "decoder.forward")
    for each in (model, alone):
        each.zero_grad()
        each.decoder(torch.ones(2, 4, dtype=torch.float64)).square().sum().backward()
        each.score(_x(6)).backward()
    assert isinstance(model.decoder.weight, DTensor)
    _same_state(model, alone)


def test_submodules_run_by_themselves_with_their_hooks(two: Workers) -> None:
    two.run(_registered_parts)


def _other_options() -> list[str]:
    with _Log() as log:
        model, alone = _models(dynamic={"x": {0: "rows"}}, output_placements="planned")
        autoshard.register_forward_method(model, "encode")
        for rows in (6, 4, 5, 9):
            codes, expected = model.encode(_x(rows)), alone.encode(_x(rows))
            assert isinstance(codes, DTensor)
            _same(codes, expected)
            codes.to_local()  # lies as planned
    return [line for line in log.lines if line.startswith("Autoencoder.encode")]


def _local_rows() -> None:
    model, alone = _models(inputs="local", input_placements={"x": (Shard(0),)})
    autoshard.register_forward_method(model, "encode")
    autoshard.register_forward_method(model, "decode")
    rank = dist.get_rank()
    for seed in (0, 1):
        x = _x(6, seed)
        mine = x.chunk(2)[rank]
        _same(model.encode(mine), alone.encode(x))
        codes = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        _same(model.decode(codes.chunk(2)[rank])["decoded"], alone.decode(codes)["decoded"])
        for each, rows in ((model, mine), (alone, x)):
            each.encode(rows).exp().sum().backward()
    _same_state(model, alone)


def test_options_hold_for_methods(two: Workers) -> None:
    first, _ = two.run(_other_options)
    assert len(first) == 1
    two.run(_local_rows)


def _errors() -> list[str]:
    model = Autoencoder().double()
    texts = []

    def error(call: Any, *args: Any) -> None:
        with pytest.raises(InputError) as info:
            call(*args)
        texts.append(str(info.value))

    error(autoshard.register_forward_method, model, "encode")
    autoshard.parallelize(model, _mesh())
    autoshard.register_forward_method(model, "encode")
    method = model.encode
    for name in ("encod", "state_dict", "encoder", "encoderr.forward", "encoded"):
        error(autoshard.register_forward_method, model, name)
    error(model.encode, _x(6))
    autoshard.register_forward_method(model, "encode")
    autoshard.register_forward_method(model, "forward")
    assert model.encode is method
    model(_x(6))
    assert model.encode(_x(6)).shape == (6, 4)
    return texts


def _missing(parts: Iterable[str], texts: Iterable[str]) -> list[tuple[str, str]]:
    return [(part, text) for part, text in zip(parts, texts, strict=True) if part not in text]


def test_errors_say_what_to_do(two: Workers) -> None:
    expected = [
        "Call parallelize first",
        "'encod' is not a method: pass the name of a method of Autoencoder that computes. Close ones are encode",
        "'state_dict' is a method of every torch.nn.Module",
        "'encoder' is a submodule: name its method, 'encoder.forward'",
        "Autoencoder has no submodule 'encoderr'. Close ones are encoder",
        "'encoded' is not a method",
        "encode is called before the first call of the module",
    ]
    for texts in two.run(_errors):
        assert _missing(expected, texts) == []
