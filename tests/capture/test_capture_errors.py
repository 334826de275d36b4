from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoshard
from autoshard.capture import export, joint
from autoshard.capture.capture_errors import is_users_file
from autoshard.capture.python.data_reads import DataReads
from autoshard.capture.python.gradient_code import GradientCode
from autoshard.capture.python.host_random import HostRandom
from autoshard.capture.python.state import AssignedTensors, StateWatch
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
    # Whose texts have words of errors that there is advice on.
    "AttributeError of a pointer": "object().data_ptr",
    "KeyError of a symbol": "{}['unbacked']",
    "TypeError of an argument": "(lambda: 0)(mutated=1)",
}


FILES = (_AUTOSHARD / "capture" / "python" / "data_reads.py", _PACKAGES / "torch" / "export" / "_trace.py")
PLACES: tuple[tuple[Any, str], ...] = (
    *((DataReads, "__torch_function__"), (DataReads, "begin"), (GradientCode, "__torch_function__")),
    *((AssignedTensors, "end"), (StateWatch, "state"), (HostRandom, "end"), (joint, "trace_joint")),
    *((joint, "check_sizes"), (export, "call_layout"), (export, "replace_python_calls")),
)


# Every kind of fault in one place, and one kind in every place.
@pytest.mark.parametrize(
    ("kind", "owner", "name"),
    [*((kind, *PLACES[0]) for kind in FAULTS), *(("TypeError of an argument", *place) for place in PLACES[1:])],
)
@pytest.mark.parametrize("file", FILES)
def test_a_fault_of_capture_is_no_refusal_in_pythons_words(
    kind: str, file: Path, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: dict[str, object] = {}
    code = f"def fail():\n    assert False\ndef fault(*args, **kwargs):\n    return {FAULTS[kind]}\n"
    exec(compile(code, str(file), "exec"), names)
    monkeypatch.setattr(owner, name, names["fault"])
    with pytest.raises(CaptureError) as raised:
        joint.capture(nn.Linear(2, 2), (torch.ones(3, 2),), {})
    assert type(raised.value.__cause__).__name__ == kind.split()[0]
    assert f"{file.name}:" in str(raised.value)
    assert "please report it" in str(raised.value)
    assert (str(raised.value.__cause__) or kind) not in str(raised.value)


class DataDependent(nn.Module):
    """Code that depends on numbers that `forward` computes."""

    def __init__(self, code: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.code, self.layer = code, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.code(self.layer(x))


def loop_over_experts(y: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(y)
    expert_mask = functional.one_hot(y.argmax(-1), 4).T
    for expert in expert_mask.sum(-1).nonzero():
        rows = torch.where(expert_mask[expert[0]])[0]
        result.index_add_(0, rows, y[rows] * expert)
    return result


def ask_which_experts_are_hit(y: torch.Tensor) -> torch.Tensor:
    result = torch.zeros_like(y)
    chosen = y.argmax(-1)
    for index, expert in enumerate((torch.tanh, torch.sin)):
        rows = (chosen == index).nonzero()[:, 0]

        if len(rows):
            result.index_add_(0, rows, expert(y[rows]))
    return result


def grow(y: torch.Tensor) -> torch.Tensor:
    lengths = y.exp().sum(-1).long()
    return torch.arange(lengths.max()) < lengths[:, None]


def choose(y: torch.Tensor) -> torch.Tensor:
    if y.sum() > 0:
        y = -y
    return y


def drop_a_layer(y: torch.Tensor) -> torch.Tensor:
    dropout_probability = torch.rand([])
    return y if dropout_probability < 0.5 else -y


def pick(y: torch.Tensor) -> torch.Tensor:
    return y[y > 0].tanh()


@pytest.mark.parametrize(
    ("code", "line", "advice", "unfit"),
    [
        (loop_over_experts, r"for expert in", "grouped_mm.*replace the module of the experts", "torch.where"),
        (ask_which_experts_are_hit, r"if len\(rows\)", "grouped_mm.*replace the module of the experts", "torch.where"),
        (grow, r"self.code", "pad to the longest", "expert"),
        (
            drop_a_layer,
            "dropout_probability < 0.5",
            r"set their probability to 0 \(Hugging Face: layerdrop",
            "torch.where",
        ),
        (choose, r"if y.sum\(\) > 0", "a branch: compute both ways", "expert"),
        (pick, r"self.code", "picking elements by a computed mask", "expert"),
    ],
)
def test_the_advice_suits_what_the_line_asks(
    code: Callable[[torch.Tensor], torch.Tensor], line: str, advice: str, unfit: str
) -> None:
    with pytest.raises(CaptureError, match=rf"(?s)test_capture_errors.py:\d+ \(.*{line}.*{advice}") as raised:
        joint.capture(DataDependent(code), (torch.ones(3, 4),), {})
    assert unfit not in str(raised.value).rpartition(")")[2]
    assert "one device" not in str(raised.value)
    assert "guard" not in str(raised.value)
