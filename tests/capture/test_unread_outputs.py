"""Outputs that training does not read: None in calls with gradients, and what a training step has without them."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from torch.nn import functional

import autoshard
from autoshard.capture.joint import capture
from autoshard.errors import HintError, PlanError
from autoshard.operators.large_losses import loss_in_pieces, loss_operator
from autoshard.planner.module_planner import ModulePlanner
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import gather_full_tensor
from autoshard.tools.verify.float64 import Float64Mode
from tests import models
from tests.models.common import Model
from tests.runtime.meshes import per_rank, simulated_mesh
from tests.training import fast_links

_STATISTICS = torch.ops.autoshard.logit_statistics.default
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


class Named(nn.Module):
    """A loss, scores and states."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.short = False

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        scores = self.layer(x)
        result = {"scores": scores} if self.short else {"scores": scores, "states": [x + 1, scores * 2]}
        return result if labels is None else {"loss": functional.cross_entropy(scores, labels), **result}


X, LABELS = torch.randn(4, 6), torch.tensor([0, 1, 2, 3])


@pytest.mark.parametrize(
    ("globs", "left"),
    [
        (("scores",), ["loss", "states[0]", "states[1]"]),
        (("states[1]",), ["loss", "scores", "states[0]"]),
        (("states*", "states[0]"), ["loss", "scores"]),
    ],
)
def test_names_and_globs(globs: tuple[str, ...], left: list[str]) -> None:
    graph = capture(Named(), (X, LABELS), {}, unread_outputs=globs)
    assert list(graph.tensor_outputs) == list(graph.result.names) == left
    result = graph.result.unflatten([torch.zeros(()) for _ in left])
    assert list(result) == ["loss", "scores", "states"]
    assert (result["scores"] is None) == ("scores" in globs)


def test_every_output_is_there_without_gradients_or_without_a_loss() -> None:
    whole = capture(Named(), (X, LABELS), {}, grad=False, unread_outputs=("scores",))
    assert "scores" in whole.tensor_outputs
    alone = capture(Named(), (X,), {}, unread_outputs=("scores",))
    assert alone.fingerprint == capture(Named(), (X,), {}).fingerprint
    frozen = Named().requires_grad_(False)
    assert "scores" in capture(frozen, (X, LABELS), {}, unread_outputs=("scores",)).tensor_outputs


class Measured(nn.Module):
    """A loss where there are labels, scores, and a norm without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Any]:
        scores = self.layer(x)
        result = {"scores": scores, "norm": scores.detach().norm()}
        return result if labels is None else {"loss": functional.cross_entropy(scores, labels), **result}


def test_a_scalar_without_a_gradient_is_no_loss() -> None:
    with pytest.raises(HintError, match="leaves no loss"):
        capture(Measured(), (X, LABELS), {}, unread_outputs=("loss",))
    assert "scores" in capture(Measured(), (X,), {}, unread_outputs=("scores",)).tensor_outputs
    assert capture(Measured(), (X, LABELS), {}, unread_outputs=("scores",)).unread == ("scores",)


def test_later_training_calls_may_lack_what_is_not_read() -> None:
    module = Named()
    alone = copy.deepcopy(module)
    placed = {"states[0]": {"x": Shard(0)}}
    options: dict[str, Any] = {"unread_outputs": ("states*",), "output_placements": placed, "cluster": fast_links()}
    with simulated_mesh(x=2) as mesh:
        autoshard.parallelize(module, mesh, (X, LABELS), **options)
        assert module(X, LABELS)["states"] == [None, None]
        module.short = alone.short = True
        output, expected = module(X, LABELS), alone(X, LABELS)
        assert list(output) == ["loss", "scores"]
        for held in per_rank(output["scores"].detach(), mesh).values():
            torch.testing.assert_close(held, expected["scores"].detach())


@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (("logits",), HintError, r"no output 'logits'; the outputs are loss, scores, states\[0\], states\[1\]"),
        (("loss",), HintError, "leaves no loss"),
        ("scores", PlanError, "pass the names of outputs in a tuple"),
    ],
)
def test_values_that_are_not_valid(given: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        autoshard.plan(Named(), {"x": 2}, (X, LABELS), unread_outputs=given)


def test_pipelines_make_all_outputs() -> None:
    with pytest.raises(PlanError, match="a pipeline can not have the option unread_outputs"):
        autoshard.plan(Named(), {"pp": 2}, (X, LABELS), unread_outputs=("scores",))


def llama() -> Model:
    module, inputs = models.hf_llama(dtype=torch.float64, layers=1)
    return module, {**inputs, "num_items_in_batch": torch.tensor(97)}


def gpt2() -> Model:
    return models.hf_gpt2(dtype=torch.float64, layers=1)


@pytest.mark.parametrize("build", [llama, gpt2])
def test_a_language_model_of_hugging_face_trains_with_its_loss_in_pieces(
    build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_in_pieces, "LARGE_LOGITS", 1)
    monkeypatch.setattr(ModulePlanner, "logits_room", 0.0)
    monkeypatch.setattr(loss_operator, "LEAST_STEP", 8)
    module, inputs = build()
    inputs["labels"][:, 2:5] = -100
    alone = copy.deepcopy(module)
    options: dict[str, Any] = {"cluster": fast_links(), "unread_outputs": ("logits",)}
    with Float64Mode(), simulated_mesh(x=2) as mesh:
        planned = autoshard.plan(module, mesh, (), inputs, **options)
        assert sum("logit_statistics" in choice.node for choice in planned.choices) == 2, "forward and backward"
        loaded = ShardingPlan.from_json(planned.to_json())
        assert loaded.is_in_pieces
        # Where whole logits have room, a plan still runs as it was made.
        monkeypatch.setattr(ModulePlanner, "logits_room", math.inf)
        assert loaded.options["unread_outputs"] == ["logits"]
        autoshard.parallelize(module, mesh, (), inputs, plan=loaded, **options)
        output = module(**inputs)
        expected = alone(**inputs)
        assert type(output) is type(expected)
        assert isinstance(output, transformers.utils.ModelOutput)
        assert output.logits is None
        assert list(output) == ["loss"]
        (output.loss * 3).backward()
        (expected.loss * 3).backward()
        for held in per_rank(output.loss.detach(), mesh).values():
            torch.testing.assert_close(held, expected.loss.detach(), **TOLERANCE)
        for name, parameter in alone.named_parameters():
            gradient = module.get_parameter(name).grad
            for held in per_rank(gather_full_tensor(gradient), mesh).values():
                torch.testing.assert_close(held, parameter.grad, **TOLERANCE)
        with torch.no_grad():
            scored = module(**inputs)
            for held in per_rank(scored.logits, mesh).values():
                torch.testing.assert_close(held, alone(**inputs).logits, **TOLERANCE)
    with pytest.raises(PlanError, match="unread_outputs"), Float64Mode(), simulated_mesh(x=2) as mesh:
        autoshard.parallelize(build()[0], mesh, (), inputs, plan=loaded, cluster=fast_links())
