from __future__ import annotations

import pytest
import torch
from torch import nn

from autoshard.capture.survey import survey
from autoshard.errors import CaptureError
from tests import models


class Asking(nn.Module):
    """Asks for numbers in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        if y.sum() > 0:
            y = y * 2
        while y.max() > 3:
            y = y / 2
        for _ in range(int(y.sum().item())):
            y = y + 1
        chosen = y[y > 0]
        places = torch.nonzero(y)
        different = torch.unique(x)
        selected = self.second(y).masked_select(x > 0)
        return chosen.sum() + places.sum() + different.sum() + selected.sum()


LINES = (
    "if y.sum() > 0:",
    "while y.max() > 3:",
    "for _ in range(int(y.sum().item())):",
    "chosen = y[y > 0]",
    "places = torch.nonzero(y)",
    "different = torch.unique(x)",
    "selected = self.second(y).masked_select(x > 0)",
)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_every_line_is_found_in_one_run(device: str) -> None:
    module = nn.Sequential(Asking(), nn.ReLU()).to(device)
    found = survey(module, (torch.zeros(3, 4, device=device),), {})
    assert [finding.where.partition(" (")[2].removesuffix(")") for finding in found.findings] == list(LINES)
    assert {finding.module for finding in found.findings} == {"0"}
    assert all("test_survey.py:" in finding.where for finding in found.findings)
    assert all(finding.what.startswith("data-dependent") for finding in found.findings)
    assert list(found.calls) == ["0", "0.first", "0.second", "1"]


def test_the_calls_of_submodules_have_their_arguments() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = models.Mlp(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x, target=x * 2)

    args, kwargs = survey(Root(), (torch.zeros(3, 4),), {}).calls["inner"]
    assert [tuple(arg.shape) for arg in args] == [(3, 4)]
    assert {name: tuple(value.shape) for name, value in kwargs.items()} == {"target": (3, 4)}


def test_nothing_is_found_where_there_is_nothing_and_nothing_is_touched() -> None:
    module, inputs = models.resnet18()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert survey(module, (), inputs).findings == ()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(not part._forward_pre_hooks for part in module.modules())


def test_what_cannot_be_stood_in_for_ends_the_run_as_a_finding() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise LookupError("no such table\nand more")

    found = survey(nn.Sequential(nn.Linear(4, 4), Failing(), nn.Linear(4, 4)), (torch.zeros(3, 4),), {})
    (finding,) = found.findings
    assert finding.what == "LookupError: no such table"
    assert finding.module == "1"
    assert 'raise LookupError("no such table\\nand more")' in finding.where
    assert list(found.calls) == ["0", "1"]


def test_a_size_without_a_stand_in_ends_the_run_at_its_line() -> None:
    class Repeating(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(x[0].long(), dim=1)

    (finding,) = survey(Repeating(), (torch.ones(3, 4),), {}).findings
    assert "repeat_interleave" in finding.where


def test_what_cannot_be_copied_is_refused() -> None:
    module = nn.Linear(4, 4)
    module.stream = (number for number in range(3))
    with pytest.raises(CaptureError, match="cannot be copied"):
        survey(module, (torch.zeros(3, 4),), {})
