from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.tools.selfcheck.__main__ import main


def test_one_process_says_that_more_were_not_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "found.json"
    assert main(["--only", "norms", "pipeline", "--json", str(output)]) == 0
    assert "1 ok, 2 skipped" in capsys.readouterr().out
    lines = json.loads(output.read_text("utf-8"))["lines"]
    assert "more were not checked" in lines[-1]["figure"]
    result = {line["check"]: line["verdict"] for line in lines}
    assert result == {"norms": "ok", "pipeline": "skipped", "several processes": "skipped"}


def test_a_name_that_no_check_has_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--only", "nothing"]) == 2
    assert "no check is named nothing" in capsys.readouterr().err
