from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.tools.cli import main
from tests.tools.cli.test_targets import LLAMA

SIZES = ("--batch", "2", "--seq", "4", "--set", "intermediate_size=32")


@pytest.fixture
def target(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return f"hf:{tmp_path}"


def test_a_plan_of_a_config_equals_one_device(target: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", target, *SIZES, "--mesh", "tp=2", "--steps", "1", "--effort", "fast"]) == 0
    assert "1 training step in float64 on tp=2 (2 ranks) equals one device" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mesh", "tp=2", "--steps", "0"), "--steps 0: pass a number of training steps"),
        (("--mesh", "pp=2"), "verify plans no pipeline"),
        (("--mesh", "tp=2", "--plan", "no_such_plan.json"), "cannot be read"),
        (("--mesh", "tp=2", "--set", "hidden_sice=3"), "has no such entry. Close ones are hidden_size"),
        (("--mesh", "tp=2", "--set", "hidden_size=wide"), "has hidden_size=32 (int), and 'wide' is a str"),
        (("--mesh", "tp=2", "--set", "hidden_size=1.5"), "and 1.5 is a float"),
        (("--mesh", "tp=2", "--set", "vocab_size=10000000000000000000"), "sizes of tensors would overflow"),
        (("--mesh", "tp=2", "--set", "hidden_size"), "write the name of an entry and its value"),
        (("--mesh", "tp=2", "--set", "vocab_size=100000000000"), "real numbers of this model need about"),
    ],
)
def test_an_argument_that_is_not_valid_is_one_line_and_status_2(
    arguments: tuple[str, ...], said: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", target, *SIZES, *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert said in printed.err
