from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from autoshard.doctor.example import load_example
from autoshard.errors import InputError

SOURCE = """
import torch
from torch import nn

def triple(): return nn.Linear(2, 2), (torch.ones(1, 2),), {}
def keywords(): return nn.Linear(2, 2), {"input": torch.ones(1, 2)}
def positional(): return nn.Linear(2, 2), (torch.ones(1, 2),)
def alone(): return nn.Linear(2, 2)
number = 3
"""


@pytest.fixture(autouse=True)
def _factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "example_factories.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")


@pytest.mark.parametrize("name", ["triple", "keywords", "positional"])
def test_a_factory_of_every_form(name: str) -> None:
    module, args, kwargs = load_example(f"example_factories:{name}")
    assert isinstance(module, nn.Linear)
    assert module(*args, **kwargs).shape == torch.Size([1, 2])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("example_factories", "names no factory"),
        ("no_such_module:make", "no_such_module cannot be imported"),
        ("example_factories:nothing", "has no function nothing"),
        ("example_factories:number", "has no function number"),
        ("example_factories:alone", "returned a Linear: return (model, args, kwargs)"),
    ],
)
def test_what_is_no_factory(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        load_example(text)
