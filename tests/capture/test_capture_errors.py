from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture import joint
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


class Wrong(nn.Module):
    """A module that fails on one device, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return {"y": x}["z"]


def test_an_error_of_the_module_itself_keeps_its_text() -> None:
    with pytest.raises(CaptureError, match=r"KeyError: 'z'\. If the module runs with these arguments on one device"):
        joint.capture(Wrong(), (torch.ones(3),), {})
