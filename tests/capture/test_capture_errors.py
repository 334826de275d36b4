from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autoshard
from autoshard.capture.capture_errors import is_users_file

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
