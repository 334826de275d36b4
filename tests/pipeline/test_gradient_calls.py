"""Hooks, functions with their own backward and gradients inside of `forward`, cut into stages."""

from __future__ import annotations

import pytest

from autoshard.capture import capture
from autoshard.errors import CaptureError
from autoshard.pipeline.graph.forward_export import export_forward, read_stage_graph
from autoshard.pipeline.graph.stage_modules import cut
from tests.models.gradients import BETWEEN, gradients, skip_between_layers
from tests.pipeline.chain import balance_stages
from tests.pipeline.exporting import cost_model
from tests.pipeline.test_stage_modules import check

PARAMETER, MODULE = "hook of a parameter", "hook of a module"


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", [name for name in BETWEEN if name not in (PARAMETER, MODULE, "tangent")])
def test_stages_have_the_gradients_that_forward_says(name: str) -> None:
    skip_between_layers(name)
    module, inputs = gradients(name, layers=6)
    graph = export_forward(module, (), inputs)
    for stages in (2, 3):
        check(graph, inputs, balance_stages(graph, stages), stages)
    assert read_stage_graph(graph, cost_model())


@pytest.mark.parametrize("name", ["straight-through", "hooks set late", "gradient inside"])
def test_stages_are_captured_with_their_gradients(name: str) -> None:
    module, inputs = gradients(name, layers=6)
    graph = export_forward(module, (), inputs)
    for part in cut(graph, balance_stages(graph, 2), 2):
        capture(part.module, *part.example, tangents="all")


def test_a_hook_stays_where_its_tensor_is_made() -> None:
    module, inputs = gradients("hooks set late")
    graph = export_forward(module, (), inputs)
    hooks = [node for node in graph.operators if str(node.target).startswith("register_hook")]
    assert len(hooks) == 2
    for hook in hooks:
        tensor = hook.args[0][0]
        (group,) = (group for group in graph.together if hook.name in group)
        assert tensor.name in group


@pytest.mark.parametrize(
    ("name", "message"), [(PARAMETER, "is on a parameter or an input"), (MODULE, "is of a module or function")]
)
def test_hooks_that_several_stages_share_are_refused(name: str, message: str) -> None:
    module, inputs = gradients(name)
    with pytest.raises(CaptureError, match=message):
        export_forward(module, (), inputs)
