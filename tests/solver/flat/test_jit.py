from __future__ import annotations

import numpy as np

from autoshard.solver.flat.random_numbers import draw, pick, random_state
from autoshard.solver.jit import jit


@jit
def drawn(state, numbers, picks, count):  # type: ignore[no-untyped-def]
    for place in range(len(numbers)):
        numbers[place] = draw(state)
        picks[place] = pick(state, count)


def test_draws_are_spread_evenly_and_follow_the_seed() -> None:
    result = []
    for seed in (0, 0, 1):
        numbers, picks = np.zeros(4000), np.zeros(4000, dtype=np.int64)
        drawn(random_state(seed), numbers, picks, 7)
        assert (numbers >= 0.0).all()
        assert (numbers < 1.0).all()
        # Five standard deviations of a mean of so many.
        assert abs(numbers.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 4000)
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 5 / np.sqrt(4000)
        assert set(picks.tolist()) == set(range(7))
        assert abs(picks.mean() - 3.0) < 5 * 2.0 / np.sqrt(4000)
        result.append(numbers)
    assert (result[0] == result[1]).all()
    assert (result[0] != result[2]).any()
