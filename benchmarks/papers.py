"""The tables of the three papers, by our plans and prices, beside what was published: python benchmarks/papers.py

Prints each quantity as published and as predicted here, how far they are apart, and what is assumed; `--write` puts the
table into docs/papers.md. Nothing is fitted: one cluster per paper, one batch per model.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from architectures import Example, bert_large, resnet50
from experts import Roles, expert_plan
from frontier import transformer, vgg16, wide_resnet
from rich.console import Console
from rich.table import Table
from torch import nn

import autoshard
from autoshard.cluster.cluster import Cluster, Link
from autoshard.plan import ShardingPlan

PAGE = Path(__file__).parent.parent / "docs" / "papers.md"
CLASSIFIER = Roles(vocabulary=("classifier",))
_GIGABIT = 1e9 / 8
_TOLERANCE = 0.2


@dataclass(frozen=True)
class Row:
    """One quantity of a paper.

    Attributes:
        source: where it stands.
        quantity: what it is.
        published: as the paper's text gives it; None where only a figure shows it.
        ours: as predicted.
    """

    source: str
    quantity: str
    published: float | None
    ours: float

    @property
    def off(self) -> float | None:
        """By how much of the published value ours differs from it."""
        return None if self.published is None else self.ours / self.published - 1

    @property
    def cells(self) -> tuple[str, ...]:
        if self.off is None:
            return self.source, self.quantity, "in the figure", f"{self.ours:.3g}", ""
        near = "" if abs(self.off) <= _TOLERANCE else " (further than 20 %)"
        return self.source, self.quantity, f"{self.published:.3g}", f"{self.ours:.3g}", f"{self.off:+.0%}{near}"


@dataclass(frozen=True)
class Part:
    """Some tables of one paper.

    Attributes:
        title: what they are about.
        assumed: what the paper does not say, and what differs here.
        rows: makes them.
    """

    title: str
    assumed: str
    rows: Callable[[], Iterator[Row]]


def hosts_of_v100(name: str, between: float, memory: int | None = None) -> Cluster:
    """Hosts of eight V100s, joined by so many bytes per second and host."""
    v100 = Cluster.of("v100")
    device = v100.device if memory is None else replace(v100.device, memory=memory)
    return replace(v100, name=name, device=device, between=Link(between / 8, v100.between.latency))


WHALE = hosts_of_v100("Whale: V100, 50 Gb/s", 50 * _GIGABIT)
TENSOROPT = hosts_of_v100("TensorOpt: V100, 100 Gb/s", 100 * _GIGABIT, memory=16 * 2**30)


def mesh_of(devices: int) -> dict[str, int]:
    return {"gpus": devices} if devices <= 8 else {"hosts": devices // 8, "gpus": 8}


def free(example: Example, mesh: Mapping[str, int], cluster: Cluster) -> ShardingPlan:
    module, inputs = example
    return autoshard.plan(module, mesh, (), inputs, output_placements="planned", cluster=cluster)


def forced(example: Example, batch: int, scheme: str, mesh: Mapping[str, int], cluster: Cluster) -> ShardingPlan:
    """The plan that follows one scheme on all axes."""
    options: dict[str, Any] = {"cluster": cluster}
    return expert_plan(example, batch, CLASSIFIER, (scheme,) * len(mesh), mesh, options)


def communication(plan: ShardingPlan, *, body: bool = True) -> float:
    """Seconds of a plan's collectives; those of a ResNet's body left out, the bridge to its classifier and the loss."""
    parts = ("stem", "blocks")
    return sum(one.count * one.seconds for one in plan.collectives if body or not one.module.startswith(parts))


_SAMPLES = 32  # per device


def image_classifier(classes: int, batch: int) -> Example:
    """ResNet-50 in float32 whose norms are taken over every image alone."""
    module, inputs = resnet50(classes, batch, dtype=torch.float32)
    for path, norm in list(module.named_modules()):
        if isinstance(norm, nn.BatchNorm2d):
            owner, _, name = path.rpartition(".")
            setattr(module.get_submodule(owner), name, nn.GroupNorm(32, norm.num_features, device="meta"))
    return module, inputs


def _whale_hybrid() -> Iterator[Row]:
    ways: dict[int, tuple[ShardingPlan, ShardingPlan, ShardingPlan]] = {}
    for devices in (8, 16, 32):
        batch, mesh = _SAMPLES * devices, mesh_of(devices)
        example = functools.partial(image_classifier, 100_000, batch)
        data = forced(example(), batch, "DDP", mesh, WHALE)
        features = forced(example(), batch, "split features", mesh, WHALE)
        ways[devices] = data, free(example(), mesh, WHALE), features
    for devices, published in zip(ways, (1.13, 1.66, 2.43), strict=True):
        data, ours, _ = ways[devices]
        ratio = data.step_seconds / ours.step_seconds
        yield Row("Whale Fig. 13", f"100k classes, hybrid over data parallel, {devices} GPUs", published, ratio)
    for devices, published in zip(ways, (1.6, None, 3.75), strict=True):
        _, ours, features = ways[devices]
        ratio = features.step_seconds / ours.step_seconds
        yield Row("Whale Fig. 15", f"100k classes, SP1 over SP2, {devices} GPUs", published, ratio)
    for devices, published in zip(ways, (0.06, None, 0.10), strict=True):
        _, ours, _ = ways[devices]
        share = communication(ours, body=False) / ours.step_seconds
        yield Row("Whale Fig. 16", f"100k classes, bridge over step, {devices} GPUs", published, share)
    data, ours, _ = ways[32]
    yield Row("Whale Fig. 16", "100k classes, collectives of data parallel over hybrid's, 32 GPUs", 6.0,
              communication(data) / communication(ours))  # fmt: skip
    steps = {}
    for devices in (8, 32):
        example = image_classifier(1_000_000, _SAMPLES * devices)
        steps[devices] = free(example, mesh_of(devices), WHALE).step_seconds
    yield Row("Whale Fig. 14", "1M classes, scaling efficiency, 8 to 32 GPUs", 0.95, steps[8] / steps[32])


def _whale_data_parallel() -> Iterator[Row]:
    builds = {
        "Whale Fig. 9": ("ResNet-50", functools.partial(image_classifier, 1000), 64),
        "Whale Fig. 10": ("BERT-Large", lambda batch: bert_large(batch=batch), 8),
    }
    for source, (name, build, samples) in builds.items():
        module, inputs = build(samples)
        alone = autoshard.plan(module, {"gpus": 1}, (), inputs, cluster=WHALE).step_seconds
        for devices in (8, 16, 32):
            batch = samples * devices
            step = forced(build(batch), batch, "DDP", mesh_of(devices), WHALE).step_seconds
            yield Row(source, f"{name}, data parallel speedup, {devices} GPUs", None, devices * alone / step)


def _tensoropt() -> Iterator[Row]:
    models = {"VGG16": (vgg16, 1.0, 0.10, 0.16), "WideResNet": (wide_resnet, 1.0, 1.99, 2.89),
              "Transformer-S": (transformer, 0.5, 1.16, 1.18)}  # fmt: skip
    for name, (build, depth, fastest, data_parallel) in models.items():
        with torch.device("meta"):
            ours = free(build(depth), mesh_of(16), TENSOROPT)
            data = forced(build(depth), 256, "DDP", mesh_of(16), TENSOROPT)
        ratio = ours.step_seconds / data.step_seconds
        yield Row("TensorOpt Table 4", f"{name}, mini-time over data parallel", fastest / data_parallel, ratio)
        yield Row("TensorOpt Table 4", f"{name}, seconds of data parallel", data_parallel, data.step_seconds)


PARTS = {
    "whale-hybrid": Part(
        "Whale 5.1.2 to 5.1.4: ResNet-50 with 100,000 and a million classes",
        f"{_SAMPLES} images per GPU (the paper does not say), 224 by 224, float32, Adam; hosts of eight V100s with "
        "NVLink and one 50 Gb/s port. Whale's batch norms see one GPU's images; ours would exchange statistics, so "
        "group norms stand in their place. Reductions of gradients run behind the backward half here, which they did "
        "not wholly in TensorFlow 1.12. The hybrid is our own plan, which nothing forces.",
        _whale_hybrid,
    ),
    "whale-data": Part(
        "Whale 5.1.1: data parallelism",
        "64 images or 8 sequences of 128 tokens per GPU (the paper does not say), float32. The text gives no numbers.",
        _whale_data_parallel,
    ),
    "tensoropt": Part(
        "TensorOpt 5.3: 16 GPUs on two hosts",
        "The models' shapes are those of benchmarks/frontier.py (the paper tells parameters and batch alone), "
        "Transformer-S has six of the twelve layers (4.9 GB, the paper has 4.8); batch 256; float32; no memory limit.",
        _tensoropt,
    ),
}


def page(found: Mapping[str, list[Row]]) -> str:
    """The table as a page."""
    lines = ["# What the papers measured, and what is predicted here", ""]
    lines += ["Written by `python benchmarks/papers.py --write`: plans and their predicted steps, nothing is run."]
    for key, rows in found.items():
        lines += ["", f"## {PARTS[key].title}", "", PARTS[key].assumed, ""]
        lines += ["| where | what | published | here | apart |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(row.cells) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", choices=PARTS, action="append", help="default: all")
    parser.add_argument("--write", action="store_true", help="write docs/papers.md, for all parts")
    args = parser.parse_args()
    if args.write and args.part:
        parser.error("--write is for all parts at once")
    torch.set_num_threads(1)
    console = Console(width=140)
    found: dict[str, list[Row]] = {}
    for key in args.part or PARTS:
        found[key] = list(PARTS[key].rows())
        table = Table("where", "what", "published", "here", "apart", title=PARTS[key].title, caption=PARTS[key].assumed)
        for row in found[key]:
            table.add_row(*row.cells)
        console.print(table)
    if args.write:
        PAGE.write_text(page(found), "utf-8")


if __name__ == "__main__":
    main()
