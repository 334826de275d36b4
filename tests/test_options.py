from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard.options import OptionKeywords, collect_options

INPUTS = (torch.empty(8, 16),)


def test_the_keywords_are_the_fields_of_the_options_and_of_their_groups() -> None:
    fields = {field.name for field in dataclasses.fields(autoshard.Options)}
    groups = {field.name for kind in (autoshard.Search, autoshard.Pipeline) for field in dataclasses.fields(kind)}
    assert OptionKeywords.__annotations__.keys() == fields | (groups - {"axis"}) | {"pipeline_axis"}


def test_options_can_not_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        autoshard.Options().inputs = "local"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("door", "time_limit", "recompute", "shares"),
    [
        ("plan", 120.0, "auto", "auto"),
        ("parallelize", 120.0, "auto", "auto"),
        ("search", 120.0, "auto", None),
        ("frontier", 240.0, "none", None),
    ],
)
def test_every_function_has_defaults_of_its_own(door: str, time_limit: float, recompute: str, shares: Any) -> None:
    options = collect_options(door, {})
    assert (options.search.time_limit, options.recompute, options.shares) == (time_limit, recompute, shares)
    assert collect_options(door, {"search": autoshard.Search(time_limit=7.0)}).search.time_limit == 7.0


@pytest.mark.parametrize("function", [autoshard.plan, autoshard.frontier])
def test_a_misspelt_keyword_names_the_close_ones(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"autoshard\.{function.__name__} takes no keyword 'optimiser'.*optimizer"):
        function(nn.Linear(16, 4), {"x": 2}, INPUTS, optimiser="sgd")


def test_what_a_function_does_not_take_is_an_error() -> None:
    with pytest.raises(TypeError, match="frontier takes no keyword 'memory_limit'"):
        autoshard.frontier(nn.Linear(16, 4), {"x": 2}, INPUTS, memory_limit="1GiB")
    with pytest.raises(TypeError, match="search takes no keyword 'dynamic'"):
        autoshard.search(nn.Linear(16, 4), 2, INPUTS, dynamic={"input": {0: "batch"}})
    with pytest.raises(TypeError, match="frontier takes no keyword 'schedule'"):
        autoshard.frontier(nn.Linear(16, 4), {"x": 2}, INPUTS, schedule="1F1B")


def test_options_are_checked_before_there_is_a_model() -> None:
    options = autoshard.check_options("frontier", {"pp": 2, "dp": 4}, cluster="a100", hints={})
    assert (options.pipeline.axis, options.search.time_limit, options.cluster) == ("pp", 240.0, "a100")
    assert autoshard.check_options("plan", {"dp": 4}).pipeline == autoshard.Pipeline()
    assert autoshard.check_options("search").pipeline.axis is None


@pytest.mark.parametrize(
    ("function", "mesh", "keywords", "error", "message"),
    [
        ("plans", None, {}, autoshard.InputError, r"autoshard\.plans takes no options of planning\. Close .* plan"),
        ("frontier", None, {"shares": "auto"}, TypeError, "frontier takes no keyword 'shares'"),
        ("plan", None, {"memory_limit": "1XB"}, autoshard.BudgetError, "unit 'XB'"),
        ("plan", None, {"optimizer": "adam-2"}, autoshard.PlanError, "adam-2"),
        ("plan", None, {"pipeline": autoshard.Pipeline(schedule="2F")}, autoshard.PipelineError, "no schedule '2F'"),
        ("plan", {"dp": 0}, {}, autoshard.MeshError, "'dp' has size 0"),
        ("plan", {"dp": 16}, {"cluster": "8xA100"}, autoshard.MeshError, "has 16 devices and cluster"),
        ("plan", {"dp": 2}, {"pipeline": autoshard.Pipeline(axis="pp")}, autoshard.MeshError, "no such axis"),
    ],
)
def test_options_that_no_model_could_have_are_refused_without_one(
    function: str, mesh: Any, keywords: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        autoshard.check_options(function, mesh, **keywords)


def test_earlier_keywords_warn_and_mean_the_same() -> None:
    earlier = {"effort": "fast", "time_limit": 5.0, "microbatches": 2, "pipeline_axis": "pp"}
    with pytest.warns(DeprecationWarning, match=r"keywords of autoshard\.plan have moved") as caught:
        options = collect_options("plan", earlier)
    assert [str(one.message).split(": write ")[1].split(". The")[0] for one in caught] == [
        "search=autoshard.Search(effort='fast', time_limit=5.0)",
        "pipeline=autoshard.Pipeline(microbatches=2, axis='pp')",
    ]
    search = autoshard.Search(effort="fast", time_limit=5.0)
    pipeline = autoshard.Pipeline(microbatches=2, axis="pp")
    assert options == collect_options("plan", {"search": search, "pipeline": pipeline})


def test_earlier_keywords_point_at_the_line_of_the_caller() -> None:
    with pytest.warns(DeprecationWarning, match=r"keywords of autoshard\.plan have moved") as caught:
        autoshard.plan(nn.Linear(16, 4), {"x": 2}, INPUTS, effort="fast")
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"recompute": "some"}, "recompute='some' is unknown: choose one of auto, none, full"),
        ({"search": {"effort": "fast"}}, r"search=\{'effort': 'fast'\}: pass an autoshard\.Search"),
        ({"pipeline": "1F1B"}, r"pipeline='1F1B': pass an autoshard\.Pipeline"),
        ({"inputs": "mine"}, "inputs='mine': choose"),
        ({"accumulate": 0}, "accumulate=0: it is the number of backwards"),
        ({"shares": {"dp": (1, 0)}}, "every rank takes a whole number above zero"),
    ],
)
def test_bad_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(autoshard.PlanError, match=message):
        autoshard.Options(**values)


def test_reductions_that_backwards_share_cost_less() -> None:
    """Hints leave the plans no choice: of data parallel, one has a fourth of the reduction, and the sums besides."""
    options = {"hints": {"*": Replicate()}, "inputs": "local", "input_placements": {"input": (Shard(0),)}}
    rows = (torch.empty(1 << 16, 16, device="meta"),)
    once, shared = (autoshard.plan(nn.Linear(16, 4), {"x": 2}, rows, accumulate=n, **options) for n in (1, 4))
    assert shared.step_seconds < once.step_seconds
    assert shared.memory.gradients == 2 * once.memory.gradients
    assert shared.options["accumulate"] == 4
    with pytest.raises(autoshard.PlanError, match="a pipeline adds up the gradients of its microbatches itself"):
        autoshard.plan(nn.Linear(16, 4), {"pp": 2}, INPUTS, accumulate=4)
