"""Methods of a parallelised module that were not registered: they run as before, or say what to do."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterator
from types import MethodType
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn import functional as F
from transformers import CLIPConfig, CLIPModel

import autoshard
from autoshard.capture._torch import FakeTensorMode
from autoshard.capture.python.fake_module import fake_copy
from autoshard.errors import InputError
from tests.memory_tracker import first_rank
from tests.training import fast_links


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 8))

    def project(self, x: Tensor) -> Tensor:
        return x @ self.weight.T

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x)


class Model(nn.Module):
    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.head = Head()
        self.part = nn.Linear(8, 8, bias=False)

    def encode(self, x: Tensor, *, scale: float | Tensor = 1.0) -> Tensor:
        """Encode rows."""
        return F.linear(x, self.weight) * scale

    def logits(self, x: Tensor) -> Tensor:
        return self._hidden(x) @ self.head.weight.T

    def _hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def classify(self, x: Tensor) -> Tensor:
        return self(x).argmax(-1)

    def sizes(self, *more: int) -> list[int]:
        if 0 in more:
            raise RuntimeError("no size is 0")
        return [*self.weight.shape, *more]

    @staticmethod
    def halved(x: Tensor) -> Tensor:
        return x / 2

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(self.encode(x)))


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with first_rank({"x": 2}) as mesh:
        yield mesh


@pytest.fixture
def model(mesh: DeviceMesh) -> Any:
    return autoshard.parallelize(Model(), mesh, (_x(),), cluster=fast_links())


def _x() -> Tensor:
    return torch.ones(2, 8)


def _error(path: str) -> str:
    return rf"^{path} of \w+ computes .*autoshard.register_forward_method\(model, '{re.escape(path)}'\)"


def test_methods_that_compute_with_parameters_name_the_call_that_registers_them(model: Any) -> None:
    for path, method in {"encode": model.encode, "logits": model.logits, "head.project": model.head.project}.items():
        with pytest.raises(InputError, match=_error(path)) as info:
            method(_x())
        assert "got mixed torch.Tensor and DTensor" in str(info.value.__cause__)
    autoshard.register_forward_method(model, "logits")
    autoshard.register_forward_method(model, "head.project")
    assert model.logits(_x()).shape == model.head.project(_x()).shape == (2, 4)
    with pytest.raises(InputError, match=_error("encode")):
        model.encode(_x())


def test_other_methods_and_arguments_run_as_before(model: Any, mesh: DeviceMesh) -> None:
    assert model.sizes(3) == [8, 8, 3]
    with pytest.raises(RuntimeError, match="no size is 0"):
        model.sizes(0)
    assert model.halved(_x()).sum() == 8
    assert model.classify(_x()).shape == (2,)
    assert isinstance(model.encode(distribute_tensor(_x(), mesh), scale=2.0), DTensor)
    with implicit_replication():
        assert isinstance(model.encode(_x()), DTensor)
    # Who passes both is told what to place.
    with pytest.raises(InputError, match=r"got mixed .*distribute_tensor"):
        model.encode(_x(), scale=distribute_tensor(torch.ones(8), mesh))


def test_methods_keep_their_names_and_arguments(model: Any) -> None:
    assert inspect.signature(model.encode) == inspect.signature(Model().encode)
    assert inspect.ismethod(model.encode)
    assert (model.encode.__name__, model.encode.__doc__) == ("encode", "Encode rows.")
    assert list(model.state_dict()) == list(Model().state_dict())
    # What a user puts in place of a method stays, on the module and on its class.
    model.sizes = list
    assert model.sizes() == []
    assert copy.deepcopy(model).sizes() == []


def test_copies_check_their_own_methods(model: Any) -> None:
    copied = copy.deepcopy(model)
    assert copied.encode.__self__ is copied
    assert copied.head.project.__self__ is copied.head
    assert copied(_x()).shape == (2, 4)
    with pytest.raises(InputError, match=_error("head.project")):
        copied.head.project(_x())
    autoshard.register_forward_method(copied, "encode")
    assert copied.encode(_x()).shape == (2, 8)
    with pytest.raises(InputError, match=_error("encode")):
        model.encode(_x())


def test_a_pickle_of_a_method_is_that_of_its_class(model: Any) -> None:
    part = nn.Module.__new__(Head)
    part.__dict__["project"] = model.head.project.__func__.__get__(part)
    assert pickle.loads(pickle.dumps(part)).__dict__["project"].__func__ is Head.project


def test_captures_see_the_methods_of_the_class(monkeypatch: pytest.MonkeyPatch) -> None:
    # On one rank, since collectives of several that do not exist leave numbers that mean nothing.
    with first_rank({"x": 1}) as mesh:
        model: Any = autoshard.parallelize(Model(), mesh, (_x(),), cluster=fast_links())
        programs = model._autoshard_runtime.programs.table
        before = model(_x())
        monkeypatch.setattr(Model, "encode", lambda self, x: F.linear(x, self.weight) * 0)
        assert model(_x()).abs().sum() == 0
        with pytest.raises(InputError, match=_error("encode")):
            model.encode(_x())
        monkeypatch.undo()
        torch.testing.assert_close(model(_x()), before)
        assert len(programs) == 1


def test_copies_that_are_captured_have_no_checks(model: Any) -> None:
    mode = FakeTensorMode()
    twin: Any = fake_copy(model, mode)
    assert twin.encode(mode.from_tensor(_x())).shape == (2, 8)
    for part in twin.modules():
        assert not part._forward_pre_hooks
        assert not any(isinstance(value, MethodType) for value in vars(part).values())


def test_code_of_torch_compile_calls_methods(model: Any) -> None:
    assert torch.compile(lambda: model.sizes(3), backend="eager")() == [8, 8, 3]


def _clip() -> Any:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {**sizes, "vocab_size": 20, "max_position_embeddings": 8, "bos_token_id": 0, "eos_token_id": 1}
    vision = {**sizes, "image_size": 4, "patch_size": 2}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def test_methods_of_hugging_face_models(mesh: DeviceMesh) -> None:
    images = {"pixel_values": torch.zeros(2, 3, 4, 4)}
    inputs = {"input_ids": torch.ones(2, 4, dtype=torch.int64), **images}
    model: Any = autoshard.parallelize(_clip(), mesh, (), inputs, cluster=fast_links())
    embedding = model.text_model.get_input_embeddings()
    assert embedding is model.text_model.embeddings.token_embedding
    assert model.num_parameters() == _clip().num_parameters()
    assert inspect.signature(model.get_image_features) == inspect.signature(_clip().get_image_features)
    # The method calls a submodule.
    with pytest.raises(InputError, match=r"^vision_model .* If a method of the model calls it, register the method"):
        model.get_image_features(**images)
    autoshard.register_forward_method(model, "get_image_features")
    assert model.get_image_features(**images).pooler_output.shape == (2, 8)


def test_methods_of_adapters(mesh: DeviceMesh) -> None:
    model: Any = peft.get_peft_model(
        Model(), peft.LoraConfig(r=2, target_modules=["part"]), autocast_adapter_dtype=False
    )
    inner: Any = model.get_base_model()
    autoshard.parallelize(model, mesh, (_x(),), cluster=fast_links())
    with pytest.raises(InputError, match=_error("base_model.model.encode")):
        inner.encode(_x())
    with model.disable_adapter():
        assert model(_x()).shape == (2, 4)
    assert inner.part.get_base_layer().weight.shape == (8, 8)
    autoshard.register_forward_method(model, "base_model.model.encode")
    assert inner.encode(_x()).shape == (2, 8)
