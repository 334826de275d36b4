from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import joint
from autoshard.capture.capture_errors import is_users_file
from autoshard.capture.data_reads import DataReads
from autoshard.capture.gradient_code import GradientCode
from autoshard.errors import CaptureError

_PACKAGES = Path(torch.__file__).parents[1]
_AUTOSHARD = Path(autoshard.__file__).parent


@pytest.mark.parametrize(
    ("file", "users"),
    [
        (_PACKAGES / "torch" / "nn" / "modules" / "module.py", False),
        (_AUTOSHARD / "api.py", False),
        (_PACKAGES / "torchvision" / "models" / "detection" / "transform.py", True),
        (_PACKAGES / "torch_models.py", True),
        (_AUTOSHARD.with_name("autoshard_models") / "model.py", True),
    ],
)
def test_packages_whose_names_begin_as_torchs_are_the_users(file: Path, users: bool) -> None:
    assert is_users_file(str(file)) is users


class Wrong(nn.Module):
    """A module that fails on one device, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"y": x}["z"]


def test_an_error_of_the_module_itself_keeps_its_text() -> None:
    with pytest.raises(CaptureError, match=r"KeyError: 'z'\. If the module runs with these arguments on one device"):
        joint.capture(Wrong(), (torch.ones(3),), {})


def test_an_error_of_a_layer_of_torch_keeps_its_text() -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.attention(x, x, x)[0]

    with pytest.raises(CaptureError, match="expecting embedding dimension of 8, but got 6") as raised:
        joint.capture(Narrow(), (torch.ones(3, 1, 6),), {})
    assert "please report" not in str(raised.value)


FAULTS = {
    "AttributeError": "object().dtype",
    "TypeError": "len(3)",
    "KeyError": "{}['missing']",
    "IndexError": "[][1]",
    "ZeroDivisionError": "1 // 0",
    "AssertionError": "fail()",
    "NameError": "undefined",
}


@pytest.mark.parametrize("kind", FAULTS)
@pytest.mark.parametrize(
    "file", [_AUTOSHARD / "capture" / "data_reads.py", _PACKAGES / "torch" / "export" / "_trace.py"]
)
@pytest.mark.parametrize(
    ("watch", "method"),
    [(DataReads, "__torch_function__"), (DataReads, "begin"), (GradientCode, "__torch_function__")],
)
def test_a_fault_of_capture_is_no_refusal_in_pythons_words(
    kind: str, file: Path, watch: type, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, object] = {}
    code = f"def fail():\n    assert False\ndef fault(*args, **kwargs):\n    return {FAULTS[kind]}\n"
    exec(compile(code, str(file), "exec"), names)
    monkeypatch.setattr(watch, method, names["fault"])
    with pytest.raises(CaptureError) as raised:
        joint.capture(nn.Linear(2, 2), (torch.ones(3, 2),), {})
    assert type(raised.value.__cause__).__name__ == kind
    assert f"{file.name}:" in str(raised.value)
    assert "please report it" in str(raised.value)
    assert (str(raised.value.__cause__) or kind) not in str(raised.value)
