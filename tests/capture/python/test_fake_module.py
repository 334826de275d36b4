from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from autoshard.capture import capture
from autoshard.capture._torch import FakeTensorMode, fake_mode
from autoshard.capture.python.fake_module import fake_copy, fake_like
from autoshard.errors import CaptureError
from tests import models

CPU = torch.device("cpu")


def test_twin_is_fake_and_tied() -> None:
    module, _ = models.gpt(tied=True)
    twin = fake_copy(module, fake_mode())
    assert type(twin) is type(module)
    assert twin.head.weight is twin.tokens.weight
    for (name, fake), (_, real) in zip(twin.named_parameters(), module.named_parameters(), strict=True):
        assert isinstance(fake, nn.Parameter), name
        assert isinstance(fake, torch._subclasses.FakeTensor), name
        assert (fake.shape, fake.dtype, fake.requires_grad) == (real.shape, real.dtype, real.requires_grad)


@pytest.mark.parametrize("source", ["real", "meta", "fake", "strided"])
def test_fake_like(source: str) -> None:
    tensor = {
        "real": lambda: torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True),
        "meta": lambda: torch.ones(2, 3, dtype=torch.bfloat16, device="meta", requires_grad=True),
        "fake": lambda: FakeTensorMode().from_tensor(torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)),
        "strided": lambda: torch.ones(3, 2, dtype=torch.bfloat16).t().requires_grad_(),
    }[source]()
    fake = fake_like(tensor, fake_mode())
    assert (fake.shape, fake.dtype, fake.device, fake.requires_grad) == ((2, 3), torch.bfloat16, CPU, True)
    assert fake.is_contiguous()


def test_the_twin_has_the_training_flags_of_the_module() -> None:
    module, _ = models.resnet18()
    module.stages.eval()
    twin = fake_copy(module, fake_mode())
    assert twin.training
    assert not twin.stages.training


class Replacement:
    """Stands in for the object that autoshard puts in the place of a module's forward."""

    def __init__(self, module: nn.Module) -> None:
        self.__module__ = "autoshard.runtime.module_runtime"
        self.module = module
        self.methods_before = [(module, "forward", module.forward)]
        self.lock = threading.Lock()  # would refuse to be copied

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the replaced forward must not be captured")


def test_forward_set_by_autoshard_gives_way() -> None:
    module, kwargs = models.mlp()
    expected = capture(module, (), kwargs).fingerprint
    module._runtime = module.forward = Replacement(module)  # type: ignore[assignment]
    assert capture(module, (), kwargs).fingerprint == expected
    assert isinstance(module.__dict__["forward"], Replacement)


def test_forward_set_by_the_user_is_kept() -> None:
    module, kwargs = models.mlp()
    expected = capture(module, (), kwargs).fingerprint
    original = module.forward
    module.forward = lambda x, target: original(x, target) * 2
    assert capture(module, (), kwargs).fingerprint != expected


def test_parameters_on_two_devices() -> None:
    module, kwargs = models.mlp()
    module.down.to("meta")
    with pytest.raises(CaptureError, match=r"up\.weight on cpu, down\.weight on meta"):
        capture(module, (), kwargs)


def test_lazy_parameters() -> None:
    with pytest.raises(CaptureError, match=r"parameter weight has no shape yet"):
        capture(nn.LazyLinear(4), (torch.ones(2, 3),), {})


def test_what_cannot_be_copied() -> None:
    module, kwargs = models.mlp()
    module.lock = threading.Lock()
    with pytest.raises(
        CaptureError, match=r"Mlp cannot be copied for capture: copy\.deepcopy refuses its attribute lock"
    ):
        capture(module, (), kwargs)


def test_meta_constant_has_no_value() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    module = Scaled(4, 4, device="meta")
    module.scale = torch.ones((), device="meta")
    graph = capture(module, (torch.ones(2, 4),), {})
    assert [(item.name, item.value) for item in graph.inputs if item.kind == "constant"] == [("scale", None)]


def test_hooks_of_the_module_itself_stay_outside() -> None:
    module, kwargs = models.mlp(dtype=torch.float64)
    plain = capture(module, (), kwargs).fingerprint
    module.register_forward_hook(lambda module, args, output: output * 2)
    module.register_forward_pre_hook(lambda module, args: None)
    assert capture(module, (), kwargs).fingerprint == plain
    assert len(module._forward_hooks) == 1


def test_attributes_keep_their_numbers() -> None:
    module = nn.Linear(2, 2)
    module.offsets = torch.arange(3.0)
    twin = fake_copy(module, fake_mode())
    assert torch.equal(twin.offsets, module.offsets)
