from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.assigned import AssignedTensors
from autoshard.capture.joint import capture
from tests.capture.interpret import run_joint
from tests.partition.meshes import simulated
from tests.training import TOLERANCE, fast_links, held_by_ranks


class Leaving(nn.Module):
    """Keeps tensors of its last call: a loss that its user adds, what it saw, and a mean that the next call reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.auxiliary: torch.Tensor | None = None
        self.mean = torch.zeros(8, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.auxiliary = y.square().mean()
        self.seen = y
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return (y * self.mean).sum()


def leaving() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), Leaving()).double()


X = torch.randn(4, 8, dtype=torch.float64)


def test_assigned_tensors_are_outputs_by_their_path() -> None:
    module = leaving()
    graph = capture(module, (X,), {})
    assert graph.result.names == ("output", "self.1.auxiliary", "self.1.mean", "self.1.seen")
    assert [(one.path, one.differentiable) for one in graph.result.attributes] == [
        ("1.auxiliary", True),
        ("1.mean", False),
        ("1.seen", True),
    ]
    assert graph.tangent_outputs == ("output", "self.1.auxiliary")
    assert module[1].auxiliary is None
    assert torch.equal(run_joint(graph, module, (X,)).output, module(X))


def _train(module: nn.Sequential) -> list[torch.Tensor]:
    """Losses of two steps, and what is left in the attributes after them and after an evaluation."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    left = []
    for _ in range(2):
        loss = module(X) + 0.5 * module[1].auxiliary
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        left.append(loss)
    left += [module[1].mean, module[1].auxiliary, module[1].seen]
    left.append(module.eval()(X))
    module.train()(X)
    return [*left, module.eval()(X), module[1].mean, module[1].seen]


def test_a_parallelised_module_sets_its_attributes_and_reads_them_again() -> None:
    module = leaving()
    expected = _train(copy.deepcopy(module))
    with simulated(x=2, y=2) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        found = _train(module)
        assert not module[1].mean.requires_grad
        assert module[1].seen.requires_grad
        for value, reference in zip(found, expected, strict=True):
            for held in held_by_ranks(value.detach()):
                assert torch.allclose(held, reference.detach(), rtol=TOLERANCE, atol=TOLERANCE)


def test_a_module_that_was_called_before_is_captured() -> None:
    module = leaving()
    module(X)
    assert module[1].seen.grad_fn is not None
    assert capture(module, (X,), {}).result.names[-1] == "self.1.seen"


def test_tensors_in_containers_are_lost_with_a_warning() -> None:
    class Listing(nn.Linear):
        def __init__(self) -> None:
            super().__init__(8, 8)
            self.means: list[torch.Tensor] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.means.append(y.mean())
            return y.sum()

    with pytest.warns(UserWarning, match=r"forward of Sequential keeps tensors in containers \(self\.0\.means\[0\]\)"):
        capture(nn.Sequential(Listing()).double(), (X,), {})


def _warn_twice() -> None:
    warnings.warn("something else", UserWarning, stacklevel=1)
    listed = "self.lstm._flat_weights[0], self.lstm._flat_weights[1]"
    warnings.warn(f"The tensor attributes {listed} were assigned during export.", UserWarning, stacklevel=1)


def test_other_warnings_pass_and_lists_of_weights_are_not_told() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with AssignedTensors(nn.Identity()).told("Model"):
            _warn_twice()
    assert [str(warning.message) for warning in raised] == ["something else"]


def test_a_recurrent_module_is_captured_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(nn.GRU(4, 4), (torch.randn(3, 2, 4),), {})
