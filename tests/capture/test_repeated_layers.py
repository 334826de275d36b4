from __future__ import annotations

from collections.abc import Iterable

import hypothesis.strategies as st
import pytest
from hypothesis import given
from torch import nn

from autoshard.capture.repeated_layers import Depth, LayerPlace, Repetition, find_repetitions, with_periods


class Numbered(nn.Module):
    def __init__(self, number: int, width: int = 4, chance: float = 0.0) -> None:
        super().__init__()
        self.number = number
        self.inner = nn.Sequential(nn.Linear(width, width), nn.Dropout(chance))


def numbered(widths: Iterable[int]) -> nn.ModuleList:
    return nn.ModuleList([Numbered(number, width) for number, width in enumerate(widths)])


@pytest.mark.parametrize(
    ("widths", "expected"),
    [
        ([4] * 6, (0, 1, 6)),
        ([4, 8] * 5, (0, 2, 5)),
        ([4, 8] * 5 + [4], (0, 2, 5)),
        ([2, *[4, 8, 8] * 5, 3], (1, 3, 5)),
        ([2, *[4] * 5, *[8] * 6, 3], (6, 1, 6)),
        ([4, 8, 2, 16, 32], None),
        ([4] * 4, None),
    ],
)
def test_the_longest_repetition_is_found(widths: list[int], expected: tuple[int, int, int] | None) -> None:
    found = find_repetitions(nn.ModuleDict({"body": numbered(widths)}), 5)
    assert found == (() if expected is None else (Repetition("body", *expected, len(widths)),))


def test_layers_differ_by_attributes_parameters_and_modes() -> None:
    def count(*layers: nn.Module) -> int:
        return sum(each.count for each in find_repetitions(nn.Sequential(*layers), 2))

    layers = [Numbered(number) for number in range(6)]
    assert count(*layers) == 6
    assert count(*layers[:3], Numbered(3, chance=0.5), *layers[4:]) == 3
    assert count(*layers[:3], Numbered(7), *layers[4:]) == 0  # the numbers no longer count the layers
    assert count(nn.Linear(4, 4), *layers, nn.Linear(4, 4)) == 6
    assert count(*layers[:2], layers[1], *layers[3:]) == 0  # one layer twice
    layers[3].eval()
    assert count(*layers) == 3
    layers[3].train()
    layers[2].requires_grad_(False)
    assert count(*layers) == 3


def test_lists_of_one_length_repeat_together() -> None:
    module = nn.ModuleDict({"a": numbered([4] * 6), "b": numbered([4] * 9), "c": numbered([8] * 6)})
    assert {each.path for each in find_repetitions(module, 5)} == {"a", "c"}
    nested = nn.ModuleDict({"a": nn.ModuleList(nn.ModuleDict({"b": numbered([4] * 7)}) for _ in range(6))})
    assert [(each.path, each.count) for each in find_repetitions(nested, 5)] == [("a", 6)]


def test_fewer_periods_keep_what_stands_around_them() -> None:
    module = nn.Sequential(*numbered([2, *[4, 8] * 5, 3, 2]))
    before = list(module)
    repetitions = find_repetitions(module, 5)
    with with_periods(module, repetitions, 2):
        assert list(module) == [*before[:5], *before[-2:]]
        assert [name for name, _ in module.named_children()] == [str(index) for index in range(7)]
    assert list(module) == before


@given(st.data())
def test_a_moved_path_corresponds_to_the_first(data: st.DataObject) -> None:
    number = st.integers(0, 4)
    start, behind, period = data.draw(number), data.draw(number), data.draw(st.integers(1, 3))
    first, second = data.draw(st.integers(2, 6)), data.draw(st.integers(2, 6))
    repetition = Repetition(data.draw(st.sampled_from(["", "model.layers"])), start, period, 9, start + 9 * period)
    index = data.draw(st.integers(0, start + first * period + behind))
    head = f"{repetition.path}." if repetition.path else ""
    path = f"{head}{index}{data.draw(st.sampled_from(['', '.linear.weight', '.3.bias']))}"
    depth, other = (Depth([repetition], count) for count in (first, second))
    place, key = depth.locate(path)
    new = None if place is None else data.draw(st.integers(0, second - 1))
    moved = depth.move(path, new, second)
    assert other.locate(moved) == (None if new is None else LayerPlace(0, new), key)
    assert other.move(moved, None if place is None else place.period, first) == path


def test_other_paths_stay() -> None:
    depth = Depth([Repetition("layers", 0, 1, 9, 9)], 3)
    for path in ("", "layers", "head.1.weight", "layers_of.1.weight"):
        assert depth.locate(path) == (None, path)
        assert depth.move(path, None, 9) == path
