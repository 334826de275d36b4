"""Hooks, functions with their own backward and gradients inside of `forward`, cut into stages."""

from __future__ import annotations

import pytest

from autoshard.errors import CaptureError
from autoshard.pipeline.graph.microbatch_step import capture_microbatch
from autoshard.pipeline.graph.operator_costs import read_stage_graph
from tests.models.gradients import BETWEEN, gradients, skip_between_layers
from tests.pipeline.chain import balance_stages
from tests.pipeline.exporting import cost_model
from tests.pipeline.test_stage_slices import check

PARAMETER = "hook of a parameter"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [name for name in BETWEEN if name != PARAMETER])
def test_stages_have_the_gradients_that_forward_says(name: str) -> None:
    skip_between_layers(name)
    module, inputs = gradients(name, layers=6)
    step = capture_microbatch(module, (), inputs)
    for stages in (2, 3):
        check(step, inputs, balance_stages(step, stages), stages)
    assert read_stage_graph(step, cost_model())


def test_hooks_on_parameters_in_forward_are_refused() -> None:
    module, inputs = gradients(PARAMETER)
    with pytest.raises(CaptureError, match=r"gradients.py:\d+ .*is on a parameter or an input"):
        capture_microbatch(module, (), inputs)
