"""No refusal quotes an error that Python raised: a fault of autoshard is told as a fault, bad input in our words."""

from __future__ import annotations

import ast
import copy
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import cluster, errors
from autoshard.capture.python.fake_module import copy_fault
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, PlanError, reason_of, summary_of
from autoshard.patterns.decisions import Decisions
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import _spec_of
from autoshard.specs.spec import Spec
from tests.sample_plan import sample_plan

_ROOT = Path(autoshard.__file__).parent

# What quotes an error that is the user's own code's, or torch's about it, with the reason.
QUOTING = {
    "patterns/borrowed.py": "a sharding strategy that is registered with torch raises it; a warning, not a refusal",
    "patterns/soundness.py": "what a rule of the user's raises on shards is the finding; torch names a wrong argument",
    "program/walk.py": "torch says which shapes of shards do not fit",
    "tools/verify/operator_faults.py": "what a local program raises on shards is the finding",
    "tools/verify/verify.py": "what a rule of the user's raises is the finding, and anything else is raised again",
    "tools/selfcheck/outcome.py": "a report of faults",
    "tools/selfcheck/self_checks.py": "a report of faults",
    "tools/cli/targets.py": "the user's file or function raises it",
    "capture/capture_errors.py": "`is_fault` decides",
    "capture/survey.py": "`is_fault` decides",
    "capture/dynamic.py": "a text of torch's is read, not shown",
}


def is_builtin(handler: ast.ExceptHandler) -> bool:
    """Return True for a handler of errors that may be Python's."""
    caught = ast.unparse(handler.type) if handler.type is not None else "BaseException"
    ours = {name for name in vars(errors) if name.endswith("Error")} | {
        *("SolverError", "WidthError", "InfeasibleHintError", "ShortfallError", "NoNumbersError", "RankLostError"),
        *("UsageError", "ModelError"),
    }
    return not set(caught.strip("()").replace(" ", "").split(",")) <= ours


def quotes(handler: ast.ExceptHandler) -> Iterator[ast.AST]:
    """Yield the places where a handler makes a text of what it caught."""
    helpers = {"reason_of", "summary_of", "file_problem", "_text_of", "copy_fault", "place"}
    name = handler.name

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in helpers:
            return
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name) and node.value.id == name:
            yield node
        if isinstance(node, ast.Call) and ast.unparse(node) in (f"str({name})", f"repr({name})"):
            yield node
        for child in ast.iter_child_nodes(node):
            yield from walk(child)

    for statement in handler.body:
        yield from walk(statement)


def test_no_handler_quotes_what_python_says() -> None:
    found = {}
    for path in sorted(_ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            # Of a package that cannot be imported, the error stays an `ImportError`.
            if isinstance(node, ast.ExceptHandler) and is_builtin(node) and not _reraises_import(node):
                for place in quotes(node):
                    found[f"{path.relative_to(_ROOT)}:{place.lineno}"] = str(path.relative_to(_ROOT))
    assert [place for place, file in found.items() if file not in QUOTING] == []


def _reraises_import(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) and "ImportError(" in ast.unparse(node) for node in ast.walk(handler))


FAULTS: dict[str, Callable[..., Any]] = {
    "AttributeError": lambda *args, **kwargs: object().dtype,  # type: ignore[attr-defined]
    "KeyError": lambda *args, **kwargs: {}["missing"],
    "TypeError": lambda *args, **kwargs: len(3),  # type: ignore[arg-type]
    "ValueError": lambda *args, **kwargs: list(zip((1,), (), strict=True)),
}


def raised(fault: Callable[..., Any], file: str = str(_ROOT / "somewhere.py")) -> Exception:
    try:
        fault()
    except Exception as error:
        return error
    raise AssertionError


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_raised_again_with_a_note(kind: str) -> None:
    error = raised(FAULTS[kind])
    with pytest.raises(type(error)) as caught:
        reason_of(error)
    assert caught.value is error
    assert "fault of autoshard: please report it" in error.__notes__[0]
    assert str(error) not in summary_of(error)
    assert "test_refusals.py:" in summary_of(error)


def test_errors_raised_on_purpose_keep_their_texts() -> None:
    names: dict[str, Any] = {}
    code = "def refuse():\n    raise ValueError(\n        'no such dim'\n    )\n"
    exec(compile(code, str(_ROOT / "specs" / "axes.py"), "exec"), names)
    assert reason_of(raised(names["refuse"])) == "no such dim"
    assert reason_of(PlanError("damaged")) == "damaged"
    assert summary_of(raised(names["refuse"])) == "ValueError: no such dim"


class Pinning(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return autoshard.shard(super().forward(x), Shard(0)).sum()


def plan(**keywords: Any) -> autoshard.ShardingPlan:
    return autoshard.plan(Pinning(8, 8), {"tp": 2}, (torch.ones(4, 8),), cluster="cpu", **keywords)


DECISIONS = {"choices": {}, "rest": {"x": "R"}, "outputs": {}, "hubs": {}}
PLAN = sample_plan().to_json()
CLUSTER = Cluster.load(Path(cluster.__file__).parent / "presets" / "cpu.json").to_json()


# Functions whose errors are told as refusals, and what calls them.
PLACES: dict[str, tuple[str, Callable[[], Any]]] = {
    "a pin in forward": ("autoshard.patterns.graph_rules.canonical", plan),
    "a pinned output": (
        "autoshard.planner.target_constraints.padded_segments_of",
        lambda: plan(output_placements={"*": Replicate()}),
    ),
    "decisions": ("autoshard.patterns.decisions.Spec.parse", lambda: Decisions.from_data(DECISIONS)),
    "a plan": ("autoshard.finite_json.json.loads", lambda: ShardingPlan.from_json(PLAN)),
    "a cluster": ("autoshard.finite_json.json.loads", lambda: Cluster.from_json(CLUSTER)),
    "a cluster's data": ("autoshard.cluster.cluster._cluster_of", lambda: Cluster.from_json(CLUSTER)),
    "a placement": (
        "autoshard.runtime.shards.check_fits",
        lambda: _spec_of(nn.Parameter(torch.ones(2)), ["weight"], {"weight": Spec.of(Replicate())}, None),
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_fault_where_a_refusal_is_made_is_told_as_a_fault(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, call = PLACES[place]
    monkeypatch.setattr(name, FAULTS["ValueError"])
    with pytest.raises(ValueError, match="zip") as caught:
        call()
    assert not isinstance(caught.value, AutoshardError)
    assert "fault of autoshard: please report it" in caught.value.__notes__[0]


def test_a_copy_that_fails_names_what_is_the_users() -> None:
    class Locked(nn.Linear):
        def __deepcopy__(self, memo: Any) -> Any:
            raise TypeError("there is one of me")

    holding, locked = nn.Sequential(nn.Linear(2, 2)), Locked(2, 2)
    holding[0].lock = threading.Lock()  # type: ignore[assignment]
    error = raised(lambda: copy.deepcopy(holding))
    assert copy_fault(holding, error) == "copy.deepcopy refuses its attribute 0.lock (lock)"
    told = copy_fault(locked, raised(lambda: copy.deepcopy(locked)))
    assert "a method of its own that copies it fails at" in told
    assert "test_refusals.py" in told
    # Nothing of the user's: a fault of ours.
    with pytest.raises(KeyError):
        copy_fault(nn.Linear(2, 2), KeyError("tensor"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("9" * 5000, "99999999999999999999... is not a finite number"),
        ("[" * 100_000, "nested too deeply"),
        ("NaN", "NaN is not a finite number"),
        ("{", "line 1, column 2"),
    ],
)
def test_files_are_refused_in_our_words(text: str, told: str) -> None:
    for load in (ShardingPlan.from_json, Cluster.from_json):
        with pytest.raises(AutoshardError, match=re.escape(told)) as caught:
            load(text)
        assert str(caught.value.__cause__) not in str(caught.value) or "not a finite" in told or "nested" in told
