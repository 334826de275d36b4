from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import autoshard
from autoshard.capture.joint import capture
from autoshard.capture.python.mutations import Mutations
from autoshard.capture.python.reachable import Reachable
from autoshard.capture.python.state import AssignedTensors
from autoshard.errors import CaptureError
from tests.capture.interpret import run_joint
from tests.runtime.meshes import simulated_mesh
from tests.training import TOLERANCE, fast_links, held_by_ranks, relative_difference


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
    assert [(one.name, one.differentiable) for one in graph.result.attributes] == [
        ("self.1.auxiliary", True),
        ("self.1.mean", False),
        ("self.1.seen", True),
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
    with simulated_mesh(x=2, y=2) as mesh:
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


def _warn_twice() -> None:
    warnings.warn("something else", UserWarning, stacklevel=1)
    listed = "self.lstm._flat_weights[0], self.lstm._flat_weights[1]"
    warnings.warn(f"The tensor attributes {listed} were assigned during export.", UserWarning, stacklevel=1)


def test_other_warnings_pass_and_lists_of_weights_are_not_told() -> None:
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        module = nn.Identity()
        reachable = Reachable(module)
        reachable.bind({})
        with AssignedTensors(module, Mutations(reachable, {})).watching():
            _warn_twice()
    assert [str(warning.message) for warning in raised] == ["something else"]


def test_a_recurrent_module_is_captured_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(nn.GRU(4, 4), (torch.randn(3, 2, 4),), {})


Change = Callable[["Stateful", torch.Tensor], None]


class Stateful(nn.Module):
    """Reads a state, changes it in training, and reads it again.

    Args:
        change: of the state, told what the module computed.
    """

    mean: torch.Tensor
    other: torch.Tensor
    empty: torch.Tensor | None
    tied: torch.Tensor

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 64, dtype=torch.float64).sin().view(8, 8))
        self.register_buffer("mean", torch.linspace(0, 1, 8, dtype=torch.float64))
        self.register_buffer("other", torch.ones(8, dtype=torch.float64))
        self.register_buffer("empty", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y = y * self.mean
        before = self.mean
        if self.training:
            self.change(self, y.detach().mean(0))
        return x + 0.1 * ((y - self.mean).tanh() + before.cos() * y.sin())


def _assign(module: Stateful, mean: torch.Tensor) -> None:
    module.mean = 0.9 * module.mean + 0.1 * mean


def _assign_without_gradients(module: Stateful, mean: torch.Tensor) -> None:
    with torch.no_grad():
        module.mean = module.mean.lerp(mean, 0.1)


def _assign_often(module: Stateful, mean: torch.Tensor) -> None:
    module.mean = module.mean + mean
    module.mean.mul_(0.5)
    module.mean = module.mean * 1.1


def _register_again(module: Stateful, mean: torch.Tensor) -> None:
    old = module.mean
    del module.mean
    module.register_buffer("mean", old * 0.5 + mean)


def _set_in_the_table(module: Stateful, mean: torch.Tensor) -> None:
    module._buffers["mean"] = module.mean + mean


def _exchange(module: Stateful, mean: torch.Tensor) -> None:
    module.mean, module.other = module.other, module.mean + mean


def _turn_round(module: Stateful, mean: torch.Tensor) -> None:
    module.mean = (module.mean + mean).view(2, 4).T.reshape(8)
    module.other = module.other.view(8)


def _assign_a_constant(module: Stateful, mean: torch.Tensor) -> None:
    module.mean = torch.full((8,), 0.25, dtype=torch.float64)


def _keep_the_old(module: Stateful, mean: torch.Tensor) -> None:
    module.last = module.mean
    module.mean = module.mean * 0.5 + mean


CHANGES: tuple[Change, ...] = (
    _assign,
    _assign_without_gradients,
    _assign_often,
    _register_again,
    _set_in_the_table,
    _exchange,
    _turn_round,
    _assign_a_constant,
    _keep_the_old,
)


class HandmadeNorm(nn.Module):
    """A batch norm whose statistics are buffers that forward sets."""

    mean: torch.Tensor
    variance: torch.Tensor
    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 8, dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(8, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(8, dtype=torch.float64))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = self.mean, self.variance
        if self.training:
            mean, variance = x.mean(0), x.var(0, correction=0)
            self.mean = 0.9 * self.mean + 0.1 * mean.detach()
            self.variance = 0.9 * self.variance + 0.1 * variance.detach()
            self.calls = self.calls + 1
        return (x - mean) * (variance + 1e-5).rsqrt() * self.scale


def _states(module: nn.Module, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:
    """Losses of three steps with batches of two sizes and evaluation between them, then parameters and buffers."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    found: dict[str, torch.Tensor] = {}
    for step in range(3):
        loss = module.train()(x[: 4 + 4 * (step % 2)]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[f"loss of step {step}"] = loss.detach()
        with torch.no_grad():
            found[f"output after step {step}"] = module.eval()(x)
    found |= {name: parameter.detach() for name, parameter in module.named_parameters()}
    found |= dict(module.named_buffers())
    return {name: held_by_ranks(value) for name, value in found.items()}


def _check(module: nn.Module, ranks: int) -> None:
    """Train on a mesh as on one device, where the state of every step is read by the next ones."""
    x = torch.randn(8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = _states(copy.deepcopy(module), x)
    with simulated_mesh(x=ranks) as mesh:
        search = autoshard.Search(effort="fast")
        autoshard.parallelize(module, mesh, (x[:4],), cluster=fast_links(), search=search)
        found = _states(module, x)
    worst = {name: relative_difference({name: found[name]}, {name: expected[name]}) for name in expected}
    assert found.keys() == expected.keys()
    assert max(worst.values()) < TOLERANCE, {name: value for name, value in worst.items() if value >= TOLERANCE}


def test_buffers_set_in_submodules_keep_their_new_values() -> None:
    _check(nn.Sequential(*map(Stateful, CHANGES)), 2)


@pytest.mark.parametrize("change", [_register_again, _exchange])
def test_buffers_set_in_the_root_module_keep_their_new_values(change: Change) -> None:
    _check(Stateful(change), 2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_handmade_norm_reads_its_own_statistics(ranks: int) -> None:
    _check(nn.Sequential(nn.Linear(8, 8).double(), HandmadeNorm(), nn.Linear(8, 8).double(), HandmadeNorm()), ranks)


def _assign_with_history(module: Stateful, mean: torch.Tensor) -> None:
    module.mean = module.mean + module.weight[0]


def _fill(module: Stateful, mean: torch.Tensor) -> None:
    module.empty = mean


def _grow(module: Stateful, mean: torch.Tensor) -> None:
    module.other = torch.cat([module.other, mean])


def _lower(module: Stateful, mean: torch.Tensor) -> None:
    module.other = mean.float()


def _draw(module: Stateful, mean: torch.Tensor) -> None:
    module.empty = torch.randn(3)


def _set_data(module: Stateful, mean: torch.Tensor) -> None:
    module.mean.data = mean


def _tie(module: Stateful, mean: torch.Tensor) -> None:
    module.tied = mean


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_assign_with_history, r"module\.weight\[0\]\) sets the buffer 1\.mean to a tensor that requires a gradient"),
        (
            _fill,
            r"module\.empty = mean\) sets the buffer 1\.empty, which was not there, to a tensor that is of shape \(8\)",
        ),
        (_grow, r"cat.* sets the buffer 1\.other, which is of shape \(8\) and torch\.float64, to a tensor .* \(16\)"),
        (
            _lower,
            r"mean\.float.* to a tensor .* torch\.float32: .*plain attribute \(self\.other",
        ),
        (_draw, r"randn\(3\)\) sets the buffer 1\.empty, which was not there"),
        (_set_data, r"module\.mean\.data = mean\) gives a tensor other numbers by setting its data"),
        (_tie, r"module\.tied = mean\) sets the buffer 1\.tied, which is registered as 1\.other too"),
    ],
)
def test_buffers_that_the_module_could_not_hold_are_refused_by_their_line(change: Change, message: str) -> None:
    module = Stateful(change)
    if change is _tie:
        module.register_buffer("tied", module.other)
    with pytest.raises(CaptureError, match=message):
        capture(nn.Sequential(nn.Linear(8, 8).double(), module), (X,), {})


def test_a_buffer_that_is_taken_away_is_refused() -> None:
    def take(module: Stateful, mean: torch.Tensor) -> None:
        module.other = None  # type: ignore[assignment]

    with pytest.raises(CaptureError, match=r"other = None .*\) sets the buffer 1\.other to None or deletes it"):
        capture(nn.Sequential(nn.Linear(8, 8).double(), Stateful(take)), (X,), {})


def test_a_table_that_depends_on_nothing_is_made_by_every_call() -> None:
    def make(module: Stateful, mean: torch.Tensor) -> None:
        if module.empty is None or len(module.empty) < 16:
            module.empty = torch.arange(16).cos()
        module.mean = module.mean + module.empty[:8]

    graph = capture(Stateful(make), (X,), {})
    assert [output.name for output in graph.outputs if output.kind == "mutation"] == ["mean"]


FACTOR = 2.0
NUMBERS = iter([3.0, 4.0, 5.0])


class Surrounded(nn.Module):
    """Reads variables outside of the module, and one of a closure."""

    def __init__(self, factor: list[float]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.float64)
        self.scale = lambda x: x * factor[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.linear(x)) * FACTOR * next(NUMBERS)  # type: ignore[no-any-return]


def test_variables_and_iterators_outside_of_the_module_keep_what_the_first_call_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    factor = [0.5]
    module = Surrounded(factor)
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, (X,), cluster=fast_links())
        first = held_by_ranks(module(X).detach())
        factor[0] = 7.0
        monkeypatch.setattr(f"{__name__}.FACTOR", 7.0)
        for held, before in zip(held_by_ranks(module(X).detach()), first, strict=True):
            assert torch.equal(held, before)
