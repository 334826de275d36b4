from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from autoshard.capture import capture
from autoshard.capture.joint_graph import fingerprint
from tests import models
from tests.workers import Workers


def _fingerprint() -> str:
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.GELU(), torch.nn.Linear(6, 4))
    return capture(module, (torch.ones(3, 4),), {}).fingerprint


def test_equal_in_other_processes(two: Workers) -> None:
    assert two.run(_fingerprint) == [_fingerprint()] * 2


def test_equal_for_other_numbers() -> None:
    first, kwargs = models.gpt(seed=0, layers=1)
    second, others = models.gpt(seed=1, layers=1)
    assert capture(first, (), kwargs).fingerprint == capture(second, (), others).fingerprint


def test_differs_with_shape_dtype_option_and_operator() -> None:
    prints = {
        capture(module, (), kwargs).fingerprint
        for module, kwargs in (
            models.gpt(layers=1),
            models.gpt(layers=1, batch=6),
            models.gpt(layers=1, dtype=torch.float64),
            models.gpt(layers=1, split="chunk"),
            models.gpt(layers=1, tied=True),
        )
    }
    assert len(prints) == 5


def test_functions_are_told_by_name_and_not_by_place() -> None:
    """An exported graph calls functions of ours in place of some operators."""

    def calling(name: str) -> str:
        made: dict[str, Callable[..., object]] = {}
        exec(f"def {name}(x):\n    return x", {"__name__": "somewhere"}, made)
        graph = fx.Graph()
        graph.output(graph.call_function(made[name], (graph.placeholder("x"),)))
        kept.append(made[name])  # or the next one might lie where it lay
        return fingerprint((), (), graph)

    kept: list[object] = []
    assert calling("first") == calling("first") != calling("second")


class RunningMean(torch.nn.Module):
    """Changes a mean, and may multiply by the former one."""

    def __init__(self, *, former: bool) -> None:
        super().__init__()
        self.former = former
        self.register_buffer("mean", torch.zeros(4))
        self.weight = torch.nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = self.mean.clone()
        self.mean.copy_(x.mean(0))
        return (x * self.weight * (mean if self.former else 1)).sum()


def test_former_values_are_those_that_results_depend_on() -> None:
    changed = {
        former: capture(RunningMean(former=former), (torch.ones(3, 4),), {}).former_values for former in (True, False)
    }
    assert changed == {True: {"mean"}, False: set()}


def test_batch_norm_reads_no_former_statistics_in_training() -> None:
    norm = torch.nn.BatchNorm1d(4)
    module = torch.nn.Sequential(norm, torch.nn.Linear(4, 4), norm)
    graph = capture(module, (torch.ones(3, 4),), {})
    assert {item.name for item in graph.outputs if item.kind == "mutation"} >= {"0.running_mean", "0.running_var"}
    assert graph.former_values == set()
