"""`autoshard.compare`: standard layouts send what their names say, and train to the numbers of one device."""

from __future__ import annotations

import functools
import json
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

import autoshard
from autoshard import Comparison, ShardingPlan
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import CaptureOptions
from autoshard.errors import PlanError
from autoshard.planner import planning
from autoshard.units import format_seconds
from tests import models
from tests.plans.pages import Page

LAYERS = 2
BATCH = 16
FAST = autoshard.Search(effort="fast")
Sent = Counter[tuple[str, str, str]]


def llama() -> models.Model:
    return models.hf_llama(batch=BATCH, layers=LAYERS)


@functools.cache
def comparison(**mesh: int) -> Comparison:
    module, inputs = llama()
    return autoshard.compare(module, mesh, (), inputs, cluster="h100", search=FAST)


def sent(plan: ShardingPlan, module: str = "", least: int = 0) -> Sent:
    """Count the collectives of modules whose path begins so, by kind, axis and phase; of at least so many bytes."""
    counts: Sent = Counter()
    for record in plan.collectives:
        if record.module.startswith(module) and record.bytes >= least:
            counts[record.kind, record.axis, record.phase] += record.count
    return counts


class Blocks(nn.Module):
    """Layers with many parameters, for a few samples."""

    def __init__(self, width: int, depth: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def parameter_bytes(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def test_ddp_only_reduces_gradients() -> None:
    plan = comparison(dp=4)["DDP"].made
    assert all(placements == (Replicate(),) for placements in plan.placements.values())
    parameters = len(list(llama()[0].parameters()))
    assert sent(plan, "model") + sent(plan, "lm_head") == {("all_reduce", "dp", "backward"): parameters}
    # Outside of these modules is the mean of the loss.
    assert sent(plan, least=64) == {("all_reduce", "dp", "backward"): parameters}
    assert plan.memory.parameters == plan.memory.gradients == parameter_bytes(llama()[0])


def test_fsdp2_gathers_parameters_and_scatters_gradients() -> None:
    found = comparison(dp=4)
    plan, whole = found["FSDP2"].made, found["FSDP2 whole"].made
    parameters = len(list(llama()[0].parameters()))
    # The backward half needs no embedding, and norms multiply by their weights in both halves.
    assert sent(plan, least=17) == {
        ("all_gather", "dp", "forward"): parameters,
        ("all_gather", "dp", "backward"): parameters - 1,
        ("reduce_scatter", "dp", "backward"): parameters,
    }
    assert sent(whole, least=17) == {
        ("all_gather", "dp", "forward"): parameters,
        ("reduce_scatter", "dp", "backward"): parameters,
    }
    assert set(plan.gathered.values()) == {"once", "again"}
    assert set(whole.gathered.values()) == {"once"}
    total = parameter_bytes(llama()[0])
    for each in (plan, whole):
        assert each.memory.parameters == each.memory.gradients == total / 4
    ddp, fsdp = found["DDP"].made.memory, plan.memory
    assert plan.memory.peak < ddp.peak
    assert ddp.optimizer / fsdp.optimizer == pytest.approx(4, rel=0.02)  # numbers of steps are whole everywhere


def test_peaks_are_those_of_the_arithmetic() -> None:
    # A layer is larger than a bucket of gradients, and its activations are next to nothing.
    module, x = Blocks(width=4096, depth=8).to("meta"), torch.empty(8, 4096, device="meta")
    total = parameter_bytes(module)
    layer = total / 8
    found = autoshard.compare(module, {"dp": 4}, (x,), cluster="h100", baselines=["DDP", "FSDP2", "FSDP2 whole"])
    peaks = {layout.name: layout.made.memory.peak for layout in found}
    # Parameters, gradients, both states of Adam, and what its step over all parameters makes.
    assert peaks["DDP"] == pytest.approx(5 * total, rel=0.001)
    # A quarter of these; the layer that computes and the next one are gathered, and one gradient is whole.
    assert 0.75 * total + 2 * layer < peaks["FSDP2"] < total + 3.1 * layer
    # The first layers that the backward half computes with are freed when most others are still gathered.
    assert 0.75 * total + 6 * layer < peaks["FSDP2 whole"] < total + 9.1 * layer
    assert found["FSDP2"].made.memory.held["gathered"] == pytest.approx(2 * layer, rel=0.01)
    assert found["FSDP2 whole"].made.memory.held["gathered"] >= 5.9 * layer


def test_tensor_parallelism_reduces_twice_per_half_of_a_layer() -> None:
    found = comparison(tp=2)
    activation = BATCH * models.SEQUENCE * models.HIDDEN * 4
    counts = {("all_reduce", "tp", "forward"): 2 * LAYERS, ("all_reduce", "tp", "backward"): 2 * LAYERS}
    plan = found["TP"].made
    # One more for the embedding, forward, and for the head, backward.
    assert sent(plan, least=activation) == {key: count + 1 for key, count in counts.items()}
    inside = sent(plan, "model.layers.1", activation)
    assert inside == {("all_reduce", "tp", "forward"): 2, ("all_reduce", "tp", "backward"): 2}
    assert plan.placements["model.layers.0.self_attn.k_proj.weight"] == (Shard(0),)
    assert plan.placements["model.layers.0.self_attn.o_proj.weight"] == (Shard(1),)
    assert plan.placements["model.layers.0.mlp.up_proj.weight"] == (Shard(0),)
    assert plan.placements["model.layers.0.mlp.down_proj.weight"] == (Shard(1),)
    assert plan.placements["model.norm.weight"] == (Replicate(),)


def test_sequence_parallelism_gathers_and_scatters_in_place_of_reductions() -> None:
    plan = comparison(tp=2)["TP+SP"].made
    part = BATCH * models.SEQUENCE * models.HIDDEN * 4 // 2
    assert sent(plan, "model.layers.1.", least=part) == {
        (kind, "tp", phase): 2 for kind in ("all_gather", "reduce_scatter") for phase in ("forward", "backward")
    }
    # Norms see a part of the sequence each, so that the gradients of their weights are sums over ranks.
    norms = [record for record in plan.collectives if "norm" in record.module and record.bytes < part]
    assert {(record.kind, record.phase) for record in norms} == {("all_reduce", "backward")}
    strategies = {choice.strategy for choice in plan.choices if choice.module.endswith("input_layernorm")}
    assert "whole" not in strategies


def test_products_split_each_axis_in_their_own_way() -> None:
    found = comparison(dp=2, tp=2)
    plan = found["FSDP2 x TP+SP"].made
    assert plan.placements["model.layers.0.mlp.up_proj.weight"] == (Shard(1), Shard(0))
    assert plan.placements["model.layers.0.mlp.down_proj.weight"] == (Shard(0), Shard(1))
    assert sent(plan, "model.layers.0.mlp.down_proj") == {
        ("all_gather", "dp", "forward"): 1,  # the shards of the weight
        ("all_gather", "dp", "backward"): 1,
        ("reduce_scatter", "dp", "backward"): 1,
        ("reduce_scatter", "tp", "forward"): 1,  # the sums of the output
        ("all_gather", "tp", "backward"): 1,
    }
    hybrid = found["HSDP"].made
    assert hybrid.placements["model.layers.0.mlp.up_proj.weight"] == (Replicate(), Shard(0))
    assert found["FSDP2"].made.placements["model.layers.0.mlp.up_proj.weight"] == (Shard(0), Shard(0))
    assert {layout.name for layout in found} == {
        *("autoshard", "DDP", "FSDP2", "FSDP2 whole", "HSDP"),
        *("DDP x TP", "FSDP2 x TP", "DDP x TP+SP", "FSDP2 x TP+SP"),
    }


@pytest.mark.parametrize("name", ["FSDP2", "FSDP2 x TP+SP"])
def test_layouts_train_to_the_numbers_of_one_device(name: str) -> None:
    module, inputs = llama()
    plan = comparison(dp=2, tp=2)[name].made
    assert autoshard.verify(module, {"dp": 2, "tp": 2}, (), inputs, plan=plan, steps=2, output_placements="planned")


def test_experts_lie_on_the_ranks_that_tokens_are_sent_to() -> None:
    module, inputs = models.ZOO["gshard"]()
    mesh = {"ep": 2}
    found = autoshard.compare(module, mesh, (), inputs, cluster="h100", baselines=["DDP x EP"], search=FAST)
    plan = found["DDP x EP"].made
    assert plan.placements["experts.up"] == plan.placements["experts.down"] == (Shard(0),)
    assert plan.placements["experts.router.weight"] == (Replicate(),)
    # Tokens to their experts and back, forward and backward; the router is data parallel.
    assert sent(plan, "experts") == {
        ("all_to_all", "ep", "forward"): 2,
        ("all_to_all", "ep", "backward"): 2,
        ("all_reduce", "ep", "backward"): 1,
    }
    assert autoshard.verify(module, mesh, (), inputs, plan=plan, steps=1, output_placements="planned")


def test_layouts_that_do_not_fit_recompute_their_layers() -> None:
    module, x = Blocks(width=16), torch.randn(4096, 16)
    options: dict[str, Any] = {"cluster": "h100", "baselines": ["DDP"]}
    plain = autoshard.compare(module, {"dp": 2}, (x,), recompute="none", **options)["DDP"].made.memory.peak
    found = autoshard.compare(module, {"dp": 2}, (x,), memory_limit=plain - 1, **options)
    plan = found["DDP"].made
    assert plan.recomputed
    assert plan.memory.peak < plain
    assert found.nearest is not None
    assert found.nearest.fits
    assert "activation_checkpoint:full" in found.nearest.torchtitan
    found = autoshard.compare(module, {"dp": 2}, (x,), recompute="none", memory_limit=plain // 8, **options)
    assert found["DDP"].made.memory.peak == plain
    assert found.nearest is not None
    assert not found.nearest.fits
    # No plan fits either: the one without a limit is compared.
    assert found.plan.memory.peak > plain // 8
    assert str(found).count("does not fit") == 2
    assert "no standard layout fits" in str(found)


def test_one_capture_serves_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[nn.Module] = []
    capture = planning.capture_repeated

    def counting(call: BoundCall, options: CaptureOptions) -> Any:
        captured.append(call.module)
        return capture(call, options)

    monkeypatch.setattr(planning, "capture_repeated", counting)
    module, inputs = models.mlp()
    mine = {"mine": {"hints": {"": autoshard.replicate()}}, "other": {"hints": {"down.weight": Shard(0)}}}
    found = autoshard.compare(module, {"dp": 2}, (), inputs, cluster="h100", baselines=mine)
    assert captured == [module]
    # A layout of the user is planned as `plan` does, whatever the layouts before it have marked.
    for name, options in mine.items():
        expected = autoshard.plan(
            module, {"dp": 2}, (), inputs, cluster="h100", output_placements="planned", hints=options["hints"]
        )
        assert found[name].made.decisions == expected.decisions
    assert found["mine"].made.placements == found["DDP"].made.placements
    assert found["mine"].kind == "own"


def test_hints_of_a_layout_make_it_again() -> None:
    module, inputs = llama()
    layout = comparison(dp=2, tp=2)["DDP x TP"]
    plan = autoshard.plan(
        module, {"dp": 2, "tp": 2}, (), inputs, cluster="h100", hints=layout.hints, output_placements="planned"
    )
    assert plan.placements == layout.made.placements
    assert sent(plan) == sent(layout.made)


def test_what_cannot_be_had_is_listed_with_the_reason() -> None:
    module, inputs = models.mlp(batch=12)
    found = autoshard.compare(module, {"dp": 5, "tp": 2}, (), inputs, cluster="h100")
    assert found["DDP"].reason == "dp=5, tp=2 does not divide the batch of 12."
    assert found["DDP x TP"].reason == "dp=5 does not divide the batch of 12."
    assert found.nearest is None
    example = (torch.empty(12, 10),)
    found = autoshard.compare(nn.Linear(10, 10), {"dp": 4}, example, baselines=["FSDP2", "DDP"], cluster="h100")
    assert found["FSDP2"].reason.startswith("dp=4 divides no dim of 100% of the parameters")
    assert found["DDP"].plan is not None


def test_layouts_with_one_reason_are_one_line() -> None:
    module, inputs = models.mlp(batch=12)
    found = autoshard.compare(module, {"dp": 5, "tp": 2}, (), inputs, cluster="h100")
    assert "no DDP, FSDP2, FSDP2 whole, HSDP: dp=5, tp=2 does not divide the batch of 12." in str(found)
    with pytest.raises(PlanError, match="there is no layout DDP: dp=5"):
        found["DDP"].expenses  # noqa: B018
    with pytest.raises(PlanError, match=r"no layout 'DPP' was compared\. Close ones are DDP"):
        found["DPP"]


def test_a_table_and_json_have_all_figures() -> None:
    found = comparison(dp=2, tp=2)
    text = str(found)
    for layout in found:
        assert layout.name in text
    data = json.loads(found.to_json())
    figures = {layout["name"]: layout for layout in data["layouts"]}
    plan = found["DDP x TP"].made
    assert figures["DDP x TP"]["step_seconds"] == plan.step_seconds
    assert figures["DDP x TP"]["peak"] == plan.memory.peak
    assert figures["DDP x TP"]["sent"]["dp"] == sum(
        record.count * record.bytes for record in plan.collectives if record.axis == "dp"
    )
    assert figures["DDP x TP"]["hints"][""] == "replicate('dp'), split('tp', rest='whole')"
    assert found.nearest is not None
    steps = {name: layout["step_seconds"] for name, layout in figures.items() if layout["kind"] == "standard"}
    assert found.nearest.name == min(steps, key=lambda name: steps[name])
    assert found.nearest.seconds_lost == pytest.approx(min(steps.values()) - found.plan.step_seconds)
    assert data["nearest"]["torchtitan"] == found.nearest.torchtitan
    assert found.difference("DDP").seconds == pytest.approx(found.plan.step_seconds - steps["DDP"])
    assert "<table" in found._repr_html_()
    page = Page(found.to_html())
    (table,) = (table for table in page.tables if table["columns"][0]["label"] == "layout")
    assert [row[:2] for row in table["rows"]] == [
        [layout.name, format_seconds(layout.made.step_seconds)] for layout in found
    ]
    assert found.nearest.torchtitan in page.words
    assert not any("autoshard compare" in text for text in page.words)
    assert "autoshard compare" in found.plan.to_html()


@pytest.mark.parametrize(
    ("baselines", "message"),
    [
        (["DPP"], r"there is no standard layout 'DPP'\. Close ones are DDP"),
        ({"DDP": {"hints": {}}}, "a layout of your own needs a name of its own"),
        ({"mine": {"": Shard(0)}}, "give its hints"),
    ],
)
def test_baselines_that_are_not_valid(baselines: Any, message: str) -> None:
    module, inputs = models.mlp()
    with pytest.raises(PlanError, match=message):
        autoshard.compare(module, {"dp": 2}, (), inputs, baselines=baselines)


def test_options_of_a_comparison() -> None:
    module, inputs = models.mlp()
    with pytest.raises(PlanError, match="compare plans no pipelines"):
        autoshard.compare(module, {"pp": 2}, (), inputs)
    with pytest.raises(TypeError, match="takes no keyword 'shares'"):
        autoshard.compare(module, {"dp": 2}, (), inputs, shares=None)
    with torch.no_grad():
        found = autoshard.compare(module, {"dp": 2}, (), inputs, cluster="h100", baselines="DDP")
    assert sent(found["DDP"].made, "up") == {}
