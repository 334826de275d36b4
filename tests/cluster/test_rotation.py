"""Work that takes turns with copies of itself."""

from __future__ import annotations

import torch

from autoshard.cluster.operator_samples import SampleCall, samples
from autoshard.cluster.rotation import Rotation


def test_work_takes_turns_with_copies_on_data_of_their_own() -> None:
    sample = samples(torch.float32, torch.device("cpu"))[0]
    made: list[SampleCall] = []

    def make() -> SampleCall:
        made.append(sample.make(4))
        return made[-1]

    rotation = Rotation(make, sample.make(4).amounts()[1])
    assert len({call.args[0].data_ptr() for call in made}) == len(made) > 1
    before = [call.args[0].clone() for call in made]
    for _ in range(2 * len(made)):
        rotation()
    assert all(torch.equal(call.args[0], kept) for call, kept in zip(made, before, strict=True))


def test_copies_of_much_data_are_few_and_their_results_stay() -> None:
    made: list[torch.Tensor] = []

    def make() -> object:
        number = float(len(made))
        made.append(torch.full((4,), number))
        return made[-1].clone

    rotation = Rotation(make, 2.0**25)  # type: ignore[arg-type]
    assert len(made) == 2
    for _ in range(5):
        rotation()
    assert [float(kept[0]) for kept in rotation._kept] == [1.0, 0.0]
