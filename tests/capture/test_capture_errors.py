from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import capture_errors, data_reads, export, joint, survey
from autoshard.capture.capture_errors import is_users_file
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


_TEXT = "'SymInt' object has no attribute 'dtype'"


def _functions() -> Iterator[tuple[Any, str]]:
    """Yield the functions of this library that capture calls, and the methods that watch `forward`."""
    modules: tuple[ModuleType, ...] = (export,)
    for module in modules:
        for name, value in vars(module).items():
            home = value.__module__ if inspect.isfunction(value) and name != "capture" else ""
            if home.startswith("autoshard.") and home != capture_errors.__name__:
                yield module, name
    for owner in (data_reads.DataReads, export._ForwardWatch):
        yield from ((owner, name) for name, value in vars(owner).items() if inspect.isfunction(value))


class Reads(nn.Module):
    """A layer that asks for numbers of its input, of what it computes, and of a size of both."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x[x[:, 0] > -99])
        if x.sum() > 1e9 or not y.isfinite().all():
            return y.sum()
        return y.square().sum()


@pytest.mark.parametrize("error", [AttributeError(_TEXT), TypeError(_TEXT), KeyError(_TEXT), AssertionError(_TEXT)])
def test_a_fault_of_this_library_is_no_refusal_in_the_words_of_python(error: Exception) -> None:
    refusals: list[tuple[str, Any]] = []
    # Each place once, with one of the errors, since a capture takes its time.
    for number, (owner, name) in enumerate(_functions()):
        if number % 4 != (AttributeError, TypeError, KeyError, AssertionError).index(type(error)):
            continue
        with mock.patch.object(owner, name, side_effect=error):
            try:
                joint.capture(Reads(), (torch.ones(3, 4),), {})
            except CaptureError as refusal:
                refusals.append((str(refusal), name))
            except type(error):
                pass  # as it is, with its traceback
    assert len(refusals) >= 5
    assert [name for text, name in refusals if "SymInt" in text or "please report it" not in text] == []


def test_a_survey_has_no_words_of_python() -> None:
    with mock.patch.object(survey._StandIns, "__torch_dispatch__", side_effect=AttributeError(_TEXT)):
        found = survey.survey(Reads(), (torch.ones(3, 4),), {})
    assert found.findings
    assert not any("SymInt" in str(finding) for finding in found.findings)


class Wrong(nn.Module):
    """A module that fails on one device, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"y": x}["z"]


def test_an_error_of_the_module_itself_keeps_its_text() -> None:
    with pytest.raises(CaptureError, match=r"KeyError: 'z'\. If the module runs with these arguments on one device"):
        joint.capture(Wrong(), (torch.ones(3),), {})
