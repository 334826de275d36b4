"""Operators of our own come into every capture, whatever a program imported first."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autoshard
from autoshard.capture import replacements
from tests.programs import ROOT

PACKAGE = Path(autoshard.__file__).parent
CAPTURES = {"capture", "capture_call", "capture_marked", "capture_repeated"}
CAPTURES |= {"export_call", "export_forward", "record_forward", "survey"}
"""Functions of the room `capture` that run a module."""

ALONE = """
import torch
from autoshard.capture import capture
capture(torch.nn.Linear(2, 2), (torch.ones(2, 2),), {})
"""


def test_a_capture_without_operators_is_an_error() -> None:
    run = subprocess.run([sys.executable, "-c", ALONE], cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode
    assert (
        "RuntimeError: autoshard.capture has no operators to put into graphs: import autoshard.operators" in run.stderr
    )


def _imports(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the modules that a file imports when it is imported, each with a name that it takes from there."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_captures_imports_the_operators() -> None:
    """So that a capture has them whichever door of the library is the first to be used, and imported alone."""
    capturing = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        names = {
            alias.name
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("autoshard.capture")
            for alias in node.names
        }
        if PACKAGE / "capture" in path.parents or not names & CAPTURES:
            continue
        capturing.add(path.relative_to(PACKAGE).parts[0])
        imported = set(_imports(path))
        rooms = ("autoshard.operators", "autoshard.planner")  # which imports the operators
        has_operators = any(module.startswith(rooms) for module, _ in imported)
        assert has_operators or ("autoshard", "operators") in imported, path
    assert {"planner", "pipeline", "tools"} <= capturing


def test_rules_and_prices_come_with_the_operators() -> None:
    """One import brings all: the parts of the room cannot be had without the whole."""
    code = (
        "import sys, autoshard.operators.norms\n"
        "from autoshard.patterns.registry import rule_names\n"
        "from autoshard.cluster.cost import _COUNTS, _WORKS\n"
        "rules = set(rule_names())\n"
        "assert {'autoshard::attention', 'autoshard::bags', 'autoshard::ctc_loss', 'autoshard::dispatch'} <= rules\n"
        "assert {'autoshard::rms_norm', 'autoshard::lstm_steps', 'autoshard::logit_statistics'} <= rules\n"
        "assert {'attention', 'gru_steps_backward', 'logit_statistics'} <= set(_COUNTS)\n"
        "assert 'logit_statistics' in _WORKS\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_they_are_installed_once() -> None:
    with pytest.raises(AssertionError, match="once"):
        replacements.install(replacements.current_replacements())
