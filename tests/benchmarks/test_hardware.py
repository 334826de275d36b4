"""`benchmarks/hardware.py`: rows are what their sources say, models have the published sizes, a row is predicted."""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which import one another as a script's do."""

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(
            hardware=load("hardware"),
            models=load("published.training_models"),
            rows=load("published.training_rows"),
            steps=load("published.training_steps"),
            training=load("published.training"),
        )


def test_rows_are_well_formed(benchmarks: SimpleNamespace) -> None:
    rows = benchmarks.rows.ROWS
    assert len(rows) == len(benchmarks.rows.ALL), "a key stands twice"
    for key, row in rows.items():
        assert row.source.link.startswith("https://"), key
        assert row.place, key
        assert row.model in benchmarks.models.MODELS, key
        assert math.prod(row.mesh.values()) == row.devices, key
        assert row.devices % (row.tensor * row.pipeline) == 0, key
        assert row.built.layers % (row.pipeline * row.virtual) == 0, key
        assert row.throughput > 0, key
        if row.pipeline > 1:
            assert row.accumulation % row.pipeline == 0, key


def test_there_are_twelve_rows_of_three_sources_and_others_are_held_out(benchmarks: SimpleNamespace) -> None:
    rows = benchmarks.rows.ROWS.values()
    compared = [row for row in rows if not row.held_out]
    assert len(compared) >= 12
    assert len({row.source.link for row in compared}) >= 3
    assert sum(row.held_out for row in rows) >= 12


@pytest.mark.parametrize(
    ("model", "sequence", "count"),
    [
        ("mpt-125m", 2048, 125_311_488),
        ("mpt-1b", 2048, 1_315_950_592),
        ("mpt-3b", 2048, 2_651_837_440),
        ("mpt-7b", 8192, 6_684_024_832),
        ("mpt-13b", 2048, 12_853_954_560),
        ("mpt-30b", 2048, 29_975_214_080),
        ("mpt-70b", 2048, 64_862_437_376),
    ],
)
def test_models_of_llm_foundry_have_the_parameters_of_its_table(
    benchmarks: SimpleNamespace, model: str, sequence: int, count: int
) -> None:
    assert _parameters(benchmarks, model, sequence) == count


def test_other_models_have_the_published_sizes(benchmarks: SimpleNamespace) -> None:
    billions = {
        "llama-2-7b": 6.74,
        "llama-2-70b": 69.0,
        "llama-3-8b": 8.03,
        "llama-3-405b": 406.0,
        "gpt-1.7b": 1.7,
        "gpt-18b": 18.4,
        "gpt-146b": 145.6,
        "gpt-1t": 1008.0,
        "resnet-50": 0.0256,
    }
    for model, size in billions.items():
        assert _parameters(benchmarks, model, 2048) == pytest.approx(size * 1e9, rel=0.03), model


def _parameters(benchmarks: SimpleNamespace, name: str, sequence: int) -> int:
    """Parameters of the whole model, from those of two depths."""
    model = benchmarks.models.MODELS[name]
    few, more = (
        sum(parameter.numel() for parameter in model.build(depth, 1, sequence, 1, 1)[0].parameters())
        for depth in (1, 2)
    )
    return few + max(0, model.layers - 1) * (more - few)


def test_figures_in_other_units_become_tokens(benchmarks: SimpleNamespace) -> None:
    rows = benchmarks.rows.ROWS
    assert rows["titan-8b-compiled"].throughput == 6667
    assert rows["resnet-a100"].throughput == pytest.approx(16621 / 8)
    # Korthikanti et al., Table 5: 51.4 % of 312 TFLOP/s without what is run again, by their Equation 7.
    row, model = rows["korthikanti-175b"], rows["korthikanti-175b"].built
    per_token = 72 * model.layers * model.width**2 * (1 + 2048 / (6 * model.width) + 51200 / (12 * 96 * model.width))
    assert row.throughput * per_token / 312e12 == pytest.approx(0.514, abs=0.002)
    # Narayanan et al., 5.1: a model of 175 billion parameters at 140 TFLOP/s trains on 300 billion tokens with 1024
    # GPUs in 34 days.
    row = dataclasses.replace(rows["megatron-146b"], model="gpt-175b", published=140.0)
    assert 300e9 / (row.throughput * 1024) / 86400 == pytest.approx(34, abs=1.0)


def test_stages_of_a_pipeline_compute_what_one_device_does(benchmarks: SimpleNamespace) -> None:
    torch.manual_seed(0)
    whole, parts = (benchmarks.models.MegatronGPT(4, 16, 2, 6, 11, stages, 1).double().eval() for stages in (1, 4))
    parts.load_state_dict(whole.state_dict())
    tokens, targets = torch.randint(11, (2, 3, 6))
    torch.testing.assert_close(parts(tokens, targets), whole(tokens, targets), rtol=1e-9, atol=0.0)


def test_attention_without_a_mask_is_the_models_own(benchmarks: SimpleNamespace) -> None:
    """Grouped keys, no mask: what `transformers` computes with its causal mask."""
    sizes = {"vocab_size": 11, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, use_cache=False)
    torch.manual_seed(0)
    module = transformers.LlamaForCausalLM(config).double()
    tokens = torch.randint(11, (2, 6))
    logits = []
    for way in ("sdpa", benchmarks.models.CAUSAL):
        module.set_attn_implementation(way)
        logits.append(module(tokens).logits)
    torch.testing.assert_close(*logits, rtol=1e-9, atol=1e-12)


@pytest.fixture(scope="module")
def small(benchmarks: SimpleNamespace) -> Iterator[Any]:
    """A row of a few seconds: four layers of MPT 125M on two GPUs, two runs a step."""
    models = benchmarks.models.MODELS
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models, "mpt-small", dataclasses.replace(models["mpt-125m"], layers=4))
        patch.setitem(models, "mpt-small-sgd", dataclasses.replace(models["mpt-small"], optimizer="sgd"))
        row = benchmarks.rows.ROWS["mpt-125m-a100"]
        yield dataclasses.replace(row, model="mpt-small", devices=2, sequence=256, microbatch=4)


@pytest.fixture(scope="module")
def exact(benchmarks: SimpleNamespace, small: Any) -> Any:
    """What is predicted of it, all layers planned."""
    return benchmarks.steps.predict(small, exact=True)


def test_the_smallest_row(benchmarks: SimpleNamespace, small: Any, exact: Any) -> None:
    assert exact.layers == (4,)
    line = benchmarks.hardware.Line.of(small, exact)
    assert line.ratio == pytest.approx(exact.throughput(small) / small.throughput, abs=0.005)
    once = benchmarks.steps.predict(dataclasses.replace(small, accumulation=1), exact=True)
    update = benchmarks.steps.update_seconds(small, 4)
    assert 0.0 < update < once.seconds / 10
    assert exact.seconds == pytest.approx(2 * once.seconds - update), "both runs gather and reduce, one updates"


def test_the_update_is_what_the_plan_counts(benchmarks: SimpleNamespace, small: Any) -> None:
    """Without an optimizer's state, a step is shorter by what moves it."""
    step, less = (
        benchmarks.steps.predict(dataclasses.replace(small, accumulation=1, model=model), exact=True).seconds
        for model in ("mpt-small", "mpt-small-sgd")
    )
    assert step - less == pytest.approx(benchmarks.steps.update_seconds(small, 4) * 4 / 7, rel=0.1)


def test_two_depths_are_continued_to_the_whole(
    benchmarks: SimpleNamespace, small: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    deeper = dataclasses.replace(benchmarks.models.MODELS["mpt-small"], layers=6)
    monkeypatch.setitem(benchmarks.models.MODELS, "mpt-deeper", deeper)
    monkeypatch.setattr(benchmarks.steps, "DEPTHS", (2, 3))
    row = dataclasses.replace(small, model="mpt-deeper")
    continued, exact = benchmarks.steps.predict(row), benchmarks.steps.predict(row, exact=True)
    assert (continued.layers, exact.layers) == ((2, 3), (6,))
    assert continued.seconds == pytest.approx(exact.seconds, rel=0.01)


def test_half_of_the_layers_run_again(benchmarks: SimpleNamespace, small: Any, exact: Any) -> None:
    half = benchmarks.steps.predict(dataclasses.replace(small, recomputation="half"), exact=True)
    more = half.seconds - exact.seconds
    assert 0.0 < more < exact.seconds / 4, "a forward half is less than half of the step, and half of it is run again"


def test_megatron_and_shards_lie_beside_each_other(benchmarks: SimpleNamespace) -> None:
    row = dataclasses.replace(benchmarks.rows.ROWS["titan-405b-tp"], model="llama-3-8b", devices=4, tensor=2)
    module, _ = row.built.build(1, 1, 16, 1, 2)
    hints = benchmarks.steps.hints(row, module, ("dp",))
    placed = {name.rpartition("layers.0.")[2]: hint for name, hint in hints.items()}
    assert {axis: placement.dim for axis, placement in placed["mlp.up_proj.weight"].items()} == {"dp": 1, "tp": 0}
    assert {axis: placement.dim for axis, placement in placed["mlp.down_proj.weight"].items()} == {"dp": 0, "tp": 1}
    assert placed["input_layernorm.weight"]["dp"].is_shard(0)
    assert placed["input_layernorm.weight"]["tp"].is_replicate()


def test_the_page_keeps_rows_that_were_not_asked_for(benchmarks: SimpleNamespace) -> None:
    hardware, rows, make = benchmarks.hardware, benchmarks.rows.ROWS, benchmarks.steps.Prediction
    near, far = rows["titan-8b-compiled"], next(row for row in rows.values() if row.held_out)
    lines = {
        row.key: hardware.Line.of(row, make(row.amount / row.devices / (row.throughput * ratio), (4, 8)))
        for row, ratio in ((near, 0.9), (far, 1.5))
    }
    text = hardware.page(lines)
    assert hardware.lines_of(text) == lines
    assert hardware.page(hardware.lines_of(text)) == text
    assert near.source.link in text
    assert f"\n* {far.key}: " in text, "a row that is far off has a reason, or says that none is known"
    assert f"\n* {near.key}: " not in text


def test_the_geometric_mean_cancels_a_ratio_and_its_inverse(benchmarks: SimpleNamespace) -> None:
    assert benchmarks.hardware.geometric_mean([0.5, 2.0]) == pytest.approx(1.0)
    assert benchmarks.hardware.geometric_mean([1.0, 1.21]) == pytest.approx(1.1)
