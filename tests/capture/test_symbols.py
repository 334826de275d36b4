"""Dynamic sizes in the operators and shapes of a step."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import fx

from autoshard.capture.joint import JointGraph, capture
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.stage_slices import cut
from tests import models


def told(graph: JointGraph) -> Counter[tuple[str, tuple[str, ...]]]:
    """Operators, with their dynamic arguments and shapes."""
    found: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for node in graph.graph.nodes:
        if node.op == "call_function":
            numbers: list[Any] = []
            fx.node.map_aggregate((node.args, node.kwargs, node.meta.get("sizes")), numbers.append)
            found[str(node.target), tuple(str(getattr(one, "expr", "")) for one in numbers)] += 1
    return found


@pytest.mark.parametrize(("name", "options"), [("gpt", {"layers": 1}), ("unet", {})])
def test_a_step_of_one_stage_is_that_of_the_model(name: str, options: dict[str, int]) -> None:
    module, inputs = models.ZOO[name](batch=4, **options)
    sizes = BatchCall(module, (), inputs).dynamic_sizes
    whole = capture_microbatch(module, (), inputs, dynamic=sizes)
    (stage,) = cut(whole, dict.fromkeys((each.name for each in whole.operators), 0), 1)
    flat = stage.step
    direct = capture(module, (), inputs, dynamic=sizes)
    assert flat.dynamic is not None
    assert direct.dynamic is not None
    assert flat.dynamic.dims == direct.dynamic.dims
    assert flat.dynamic.example == direct.dynamic.example
    assert told(flat) == told(direct)
