"""`benchmarks/papers.py`: the page is put together part by part, models have the papers' sizes, parts run."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[SimpleNamespace]:
    """The modules of the benchmark, which import one another as a script's do."""

    def load(name: str) -> ModuleType:
        return importlib.import_module(name)

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield SimpleNamespace(
            papers=load("papers"),
            part=load("published.part"),
            clusters=load("published.clusters"),
            models=load("published.models"),
            rhino=load("published.rhino"),
        )


def test_a_row_tells_how_far_it_is_from_the_paper(benchmarks: SimpleNamespace) -> None:
    make = benchmarks.part.Row
    near, far, unknown, none = (
        make("Fig. 1", "it", *both) for both in ((2.0, 2.2), (2.0, 3.0), (None, 1.0), (8, None))
    )
    assert near.is_near
    assert near.cells[-1] == "+10%"
    assert not far.is_near
    assert "further" in far.cells[-1]
    assert unknown.is_near
    assert unknown.cells[2:] == ("in the figure", "1", "")
    assert not none.is_near
    assert none.cells[3] == "nothing fits"


def test_a_part_replaces_its_own_section(benchmarks: SimpleNamespace) -> None:
    papers, row = benchmarks.papers, benchmarks.part.Row
    first, last = next(iter(papers.PARTS)), list(papers.PARTS)[-1]
    page = papers.page("", {last: [row("Fig. 9", "old", 1.0, 1.0)]})
    page = papers.page(page, {first: [row("Fig. 1", "other", 1.0, 1.0)]})
    page = papers.page(page, {last: [row("Fig. 9", "new", 1.0, 1.0)]})
    assert "| new |" in page
    assert "| old |" not in page
    assert page.index("| other |") < page.index("| new |"), "parts stand in their order"
    assert page == papers.page(page, {}), "nothing gets lost"


def test_models_have_the_sizes_of_the_tables(benchmarks: SimpleNamespace) -> None:
    rhino, models = benchmarks.rhino, benchmarks.models
    sizes = {"GPT-Medium": 0.35e9, "GPT-6.7B": 6.7e9, "MoE-8E-760M": 0.76e9, "MoE-32E-10B": 10e9}
    examples = {one.name: one.build(1, 1.0) for one in (*rhino.GPTS, *rhino.MIXTURES) if one.name in sizes}
    examples["M6-10B"], sizes["M6-10B"] = models.m6_10b(1), 10e9
    for name, (module, _) in examples.items():
        count = sum(parameter.numel() for parameter in module.parameters())
        assert count == pytest.approx(sizes[name], rel=0.05), name


def test_wide_resnets_grow_as_the_table_says(benchmarks: SimpleNamespace) -> None:
    shapes = {1.3: (320, 2, 6), 2.6: (448, 2, 6), 6.0: (640, 2, 6), 12.0: (320, 12, 23)}
    for billions, (channels, widen, longest) in shapes.items():
        module, _ = benchmarks.models.wide(channels, widen, (3, 4, longest, 3), 4)
        count = sum(parameter.numel() for parameter in module.parameters())
        assert 0.65 < count / (billions * 1e9) < 0.8, billions


def test_attention_is_computed_in_several_operators(benchmarks: SimpleNamespace) -> None:
    for module, inputs in (benchmarks.models.gpt(1, 64, 2, 1), benchmarks.models.bert(1, 0.01)):
        graph = torch.export.export(module, (), inputs, strict=False).graph
        targets = {str(node.target) for node in graph.nodes}
        assert any("softmax" in target for target in targets)
        assert not any("scaled_dot_product" in target for target in targets)


def test_devices_keep_up_the_same_share_of_their_rates(benchmarks: SimpleNamespace) -> None:
    clusters = benchmarks.clusters
    mixed, single = clusters.mixed(8), clusters.WHALE
    for rank, name in ((0, "v100"), (15, "p100")):
        sheet = clusters.Cluster.preset(name).device
        assert mixed.device_of(rank).rate("float32") == pytest.approx(clusters.KEPT * sheet.rate("float32"))
        assert mixed.device_of(rank).memory_bandwidth == pytest.approx(clusters.KEPT * sheet.memory_bandwidth)
    assert single.device.rate("float32") == mixed.device_of(0).rate("float32")


@pytest.mark.parametrize("key", ["whale-pipelines", "rhino-alone"])
def test_the_smallest_row_of_a_part(benchmarks: SimpleNamespace, key: str) -> None:
    row = next(benchmarks.papers.PARTS[key].rows(0.05))
    low, high = {"whale-pipelines": (0.9, 1.5), "rhino-alone": (0.5, 1.0)}[key]
    assert low < row.ours < high
