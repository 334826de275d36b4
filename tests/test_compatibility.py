"""The private names of torch that the library stands on: the installed release has them."""

from __future__ import annotations

import importlib
import re
import runpy
from typing import Any

import pytest
import torch

from tests.programs import ROOT
from tests.releases import skip

uses = runpy.run_path(str(ROOT / "docs" / "compatibility.py"))["uses"]


def _is_in_torch(name: str) -> bool:
    """Import the longest module that a name begins with, and look up the rest in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            if not hasattr(found, part):
                return False
            found = getattr(found, part)
        return True
    return False


def test_the_installed_torch_has_all_private_names() -> None:
    """One message names all that a new release lacks, before anything else fails of it."""
    adapters = sorted(path for room in ("autoshard", "tests") for path in (ROOT / room).rglob("_torch.py"))
    lacking = [
        f"{path.relative_to(ROOT)}: {use.name} ({use.purpose or 'no comment'})"
        for path in adapters
        for use in uses(path.read_text(encoding="utf-8"))
        if not use.is_asked_for and not _is_in_torch(use.name)
    ]
    assert not lacking, "\n".join([f"torch {torch.__version__} lacks {len(lacking)} of the private names:", *lacking])


SOURCE = """
import torch
from torch._ops import OpOverload, Nothing  # an operator
from torch.utils import _pytree as pytree
from torch.distributed.tensor import DTensor
try:
    from torch._of_tomorrow import Kind
except ImportError:
    Kind = None
pytree.tree_fold, DTensor._dispatch, Kind.FAST, Kind.__name__
hasattr(torch.ops.aten, "_fast") and torch.ops.aten._fast(1)
"""


@pytest.mark.parametrize(
    ("name", "asked", "present"),
    [
        ("torch._ops.OpOverload", False, True),
        ("torch._ops.Nothing", False, False),
        ("torch.utils._pytree", False, True),
        ("torch.utils._pytree.tree_fold", False, False),
        ("torch.distributed.tensor.DTensor._dispatch", False, False),
        ("torch._of_tomorrow.Kind", True, False),
        ("torch._of_tomorrow.Kind.FAST", True, False),
        ("torch.ops.aten._fast", True, False),
    ],
)
def test_names_are_found_with_what_is_asked_for(name: str, asked: bool, present: bool) -> None:
    found = {use.name: use.is_asked_for for use in uses(SOURCE)}
    assert len(found) == 8
    assert found[name] == asked
    assert _is_in_torch(name) == present


def test_a_test_is_skipped_but_with_the_release_of_the_constraints(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (release,) = (line.removeprefix("torch==") for line in lines if line.startswith("torch=="))
    for installed, outcome in ((f"{release}+cpu", pytest.fail.Exception), ("2.11.0", pytest.skip.Exception)):
        monkeypatch.setattr(torch, "__version__", installed)
        with pytest.raises(outcome, match=f"torch {re.escape(installed)} lacks a feature"):
            skip("a feature")
