"""Random numbers of Python and NumPy in `forward`: refused by their line where anything depends on them."""

# ruff: noqa: NPY002, models draw from what NumPy shares

from __future__ import annotations

import random
from collections.abc import Callable
from random import random as draw

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoshard.capture import capture
from autoshard.errors import CaptureError

X = torch.randn(4, 8, dtype=torch.float64)
OWN = random.Random(3)
NUMPYS, OLDER = np.random.default_rng(3), np.random.RandomState(3)


class Dropping(nn.Module):
    """Scales its layer by what a function gives."""

    def __init__(self, scale: Callable[[], float]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, dtype=torch.float64)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.scale()).sum()


DRAWS: dict[str, Callable[[], float]] = {
    "branch": lambda: 2.0 if random.random() < 0.5 else 1.0,
    "scale": lambda: random.uniform(1, 2),
    "choice": lambda: random.choice([1.0, 2.0]),
    "gauss": lambda: random.gauss(0, 1),
    "own generator": lambda: OWN.randint(0, 5),
    "unseeded": lambda: random.Random().random() * 2,
    "NumPy's": lambda: 2.0 if np.random.rand() < 0.5 else 1.0,
    "NumPy's normal": lambda: float(np.random.normal()),
    "NumPy's array": lambda: float(np.random.uniform(size=2)[0]),
    "NumPy's generator": lambda: NUMPYS.normal(),
    "NumPy's older generator": lambda: OLDER.uniform(),
    "NumPy's unseeded": lambda: np.random.default_rng().normal(),
}


@pytest.mark.parametrize("name", DRAWS)
def test_what_depends_on_a_draw_is_refused_by_its_line(name: str) -> None:
    methods, functions = dict(vars(random.Random)), dict(vars(random))
    states = repr((NUMPYS.bit_generator.state, OLDER.get_state()))
    with pytest.raises(CaptureError, match=r"test_host_random.py:\d+ \(.*lambda.* draws a random number"):
        capture(Dropping(DRAWS[name]), (X,), {})
    assert (dict(vars(random.Random)), dict(vars(random))) == (methods, functions)
    assert repr((NUMPYS.bit_generator.state, OLDER.get_state())) == states


def test_a_draw_that_nothing_sees_is_refused_too() -> None:
    with pytest.raises(CaptureError, match="forward of Dropping draws a random number"):
        capture(Dropping(draw), (X,), {})


def seeded_numpy() -> float:
    np.random.seed(5)
    return float(np.random.permutation(4)[0] + np.random.sample())


def seeded_python() -> float:
    random.seed(5)
    return random.random() + random.randint(0, 3)


HARMLESS: dict[str, Callable[[], float]] = {
    "NumPy's shared generator, seeded": seeded_numpy,
    "the shared generator, seeded": seeded_python,
    "never": lambda: 2.0 if random.uniform(0, 1) < 0.0 else 1.0,
    "NumPy's never": lambda: 2.0 if np.random.uniform(0, 1) < 0 else 1.0,
    "always": lambda: 2.0 if 1 - random.random() * 0.5 >= 0.5 else 1.0,
    "seeded": lambda: random.Random(5).random(),
    "NumPy's seeded": lambda: np.random.default_rng(5).normal(),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_no_draw_changes_is_captured(name: str) -> None:
    assert len({capture(Dropping(HARMLESS[name]), (X,), {}).fingerprint for _ in range(2)}) == 1


def test_generators_of_the_module_are_refused() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = {"noise": np.random.default_rng(3)}

        def forward(self, x: Tensor) -> Tensor:
            return x * self.held["noise"].normal()

    with pytest.raises(CaptureError, match=r"test_host_random.py:\d+ \(return x \* self.held.* draws a random number"):
        capture(Net(), (X,), {})


def test_seeds_of_torch_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"\(.*manual_seed.*\) sets the seed of torch's random numbers in forward"):
        capture(Dropping(lambda: float(torch.manual_seed(3).initial_seed())), (X,), {})
