"""A few random models, and those that were not right once; `python -m tests.fuzz` runs as many as one likes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.fuzz.__main__ import alone
from tests.fuzz.case import MESHES, Case, on_one_device, run, run_seed
from tests.fuzz.heads import HEADS
from tests.fuzz.model import BLOCKS, RandomModel

FRESH = tuple(range(1001, 1004))
FAILED = {
    "a kernel that wants its operand row by row": Case(
        14, RandomModel((("time_first", "add"),), "next_token", 12, 5, False), (2, 2), "fast", "full"
    ),
    "an unbiased variance of a dynamic batch": Case(
        200064,
        RandomModel((("norm_inside", "add"),), "ranking", 8, 4, False),
        *((2, 2), "fast"),
        dynamic=True,
        planned_outputs=True,
    ),
    "an input that every rank holds alike, exchanged": Case(
        200044,
        RandomModel(
            (("row_in_place", "norm"), ("sorted_along_time", "add"), ("experts_with_capacity", "add")),
            *("robust", 24, 6, True),
        ),
        *((4,), "random", "auto", 0.7, 0.5),
    ),
    "windows that are written in place, one after the other": Case(
        6, RandomModel((("window_in_place", "add"),), "no_loss", 8, 2, False), (2,), forced=0.3
    ),
    "a gradient that is cast and then copied": Case(
        900064,
        RandomModel((("diagonal_in_place", "norm"), ("elman_both_ways", "norm")), "robust", 8, 8, True),
        *((2, 2), "full", "auto"),
        hinted=True,
        casts=True,
    ),
}
"""Cases that failed once, by what was the matter."""


@pytest.mark.parametrize("seed", FRESH)
def test_a_random_model_is_right_or_refused(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.kind in ("right", "refused"), f"{outcome.case}\n{outcome.said}"


@pytest.mark.parametrize("what", FAILED)
def test_what_failed_once_is_right(what: str) -> None:
    outcome = run(FAILED[what])
    assert outcome.kind == "right", f"{outcome.case}\n{outcome.said}"


def test_seeds_draw_all_there_is() -> None:
    cases = [Case.of(seed) for seed in range(2000)]
    assert {name for case in cases for name, _ in case.drawn.blocks} == BLOCKS.keys()
    assert {case.drawn.head for case in cases} == HEADS.keys()
    assert {case.mesh for case in cases} == set(MESHES)
    for option in ("limited", "hinted", "dynamic", "shares", "local", "planned_outputs", "casts", "lowered", "change"):
        assert {bool(getattr(case, option)) for case in cases} == {True, False}
    assert cases[7] == Case.of(7)
    assert len({str(case) for case in cases}) == len(cases)


@pytest.mark.filterwarnings("ignore")
def test_every_block_and_head_computes_on_one_device() -> None:
    case = Case.of(1)
    small = replace(case.drawn, blocks=(("two_layers", "add"),), width=12, batch=4, head="no_loss")
    cases = {name: alone(replace(case, drawn=small), name, lowered=False) for name in BLOCKS}
    cases |= {name: replace(case, drawn=replace(small, head=name), lowered=False, casts=False) for name in HEADS}
    assert len(cases) == len(BLOCKS) + len(HEADS)
    for name, one in cases.items():
        _, traced = on_one_device(one)
        tensors = [tensor for step in traced.values() for held in step.values() for tensor in held]
        assert tensors, name
        assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors), name
