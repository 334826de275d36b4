from __future__ import annotations

import json
from dataclasses import asdict

from hypothesis import given
from hypothesis import strategies as st

from autoshard.memory.footprint import KINDS, Allocation, Memory, bytes_by_kind, changes_by_kind, kept_by_module, peak

ALLOCATIONS = st.lists(
    st.builds(
        lambda size, start, length, kind: Allocation("t", size, start, start + length, kind),
        st.integers(0, 100),
        st.integers(0, 12),
        st.integers(0, 12),
        st.sampled_from(KINDS),
    ),
    max_size=12,
)


def test_a_step_by_hand() -> None:
    step = [
        Allocation("w", 10, 0, 6, "parameter"),
        Allocation("state", 20, 0, 6, "optimizer"),
        Allocation("x", 7, 1, 4, "saved"),
        Allocation("w, whole", 30, 2, 3, "gathered"),
        Allocation("scratch", 5, 3, 4, "temporary"),
        Allocation("w'", 10, 4, 6, "gradient"),
    ]
    assert peak(step) == (67, 2)
    held = bytes_by_kind(step, 2)
    assert {kind: held[kind] for kind in KINDS if held[kind]} == {
        "parameter": 10,
        "optimizer": 20,
        "saved": 7,
        "gathered": 30,
    }
    memory = Memory.of(step, place=lambda moment: ("forward", "layer", f"operator {moment}"))
    assert (memory.parameters, memory.gradients, memory.optimizer, memory.buffers) == (10, 10, 20, 0)
    assert (memory.activations, memory.peak) == (37, 67)
    assert memory.held == {"parameter": 10, "optimizer": 20, "saved": 7, "gathered": 30}
    assert (memory.phase, memory.module, memory.operator) == ("forward", "layer", "operator 2")
    assert [one.name for one in memory.largest] == ["w, whole", "state", "w", "x"]
    assert Memory.from_data(json.loads(json.dumps(asdict(memory)))) == memory


def test_what_ends_makes_room_for_what_starts() -> None:
    assert peak([Allocation("a", 8, 0, 2, "saved"), Allocation("b", 8, 2, 4, "saved")]) == (8, 0)


def test_what_is_kept_crosses_the_border_of_the_halves() -> None:
    step = [
        Allocation("x", 7, 1, 5, "saved", "a"),
        Allocation("y", 2, 0, 9, "saved", "a"),
        Allocation("last", 1, 4, 5, "saved", "b"),
        Allocation("w, whole", 30, 2, 8, "gathered", "b"),
        Allocation("w, again", 30, 4, 8, "gathered", "b"),
        Allocation("freed", 40, 2, 4, "gathered", "b"),
        Allocation("loss", 4, 3, 9, "output", "b"),
        Allocation("w", 10, 0, 9, "parameter", "b"),
    ]
    assert kept_by_module(step, 4) == {"a": {"saved": 9}, "b": {"saved": 1, "gathered": 30}}
    # Of runs that are under way, the first moments have the tensors of all.
    others = [held._replace(bytes=2 * held.bytes, start=0) for held in step if held.start < 4 < held.end]
    assert kept_by_module([*step, *others], 4, under_way=3) == kept_by_module(step, 4)


def test_nothing_takes_nothing() -> None:
    assert peak([]) == (0, 0)
    assert Memory.of([]) == Memory()


@given(ALLOCATIONS)
def test_the_peak_is_the_largest_sum_over_all_moments(allocations: list[Allocation]) -> None:
    most, moment = peak(allocations)
    assert most == max(sum(bytes_by_kind(allocations, at).values()) for at in range(30))
    assert sum(bytes_by_kind(allocations, moment).values()) == most


@given(ALLOCATIONS)
def test_the_account_bounds_the_peak(allocations: list[Allocation]) -> None:
    account = Memory.of(allocations)
    parts = account.parameters + account.gradients + account.optimizer + account.buffers + account.activations
    assert account.activations <= account.peak <= parts


@given(ALLOCATIONS)
def test_changes_tell_the_bytes_of_every_kind_at_every_moment(allocations: list[Allocation]) -> None:
    changes = changes_by_kind(allocations)
    for moment in range(30):
        held = {kind: [amount for at, amount in rows.tolist() if at <= moment] for kind, rows in changes.items()}
        expected = bytes_by_kind(allocations, moment)
        assert {kind: held[kind][-1] if held.get(kind) else 0 for kind in KINDS} == expected
