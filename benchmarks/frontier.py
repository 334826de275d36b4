"""Seconds of frontier tracking on TensorOpt's models, for 16 GPUs: python benchmarks/frontier.py

For each model of the paper's Table 1: FT-LDP and FT-Elimination on the problem of the whole training step (memory is
the sum of all usages, as there), what is proved of the frontier found, beside the paper's seconds (Table 3), and
`autoshard.frontier`, whose peaks are those of the account. The problems are not the paper's: ours have a node for every
operator of the forward and backward half, one mesh axis of 16 and so few strategies a node; theirs have a node for a
layer and every way to split it over 16 devices. What both have in common is the model and the question. Ours are
processor seconds of one thread.

The paper tells parameters and batch, not shapes. Assumed here, in float32 on two hosts of eight V100s:

* VGG-16: images of 224 by 224, 1000 classes (0.55 GB; the paper has 0.52).
* WideResNet: depth 152 in bottlenecks, 352 channels, 1000 classes (7.1 GB; the paper has 7.3).
* RNN: 10 layers of LSTM, 18,432 wide, 20 steps (109 GB; the paper has 108).
* Transformer: 12 layers, 4096 wide, 32 heads, 128 tokens, vocabulary 8192 (9.9 GB; the paper has 9.7).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from architectures import VGG, ResNet
from gpt import GPT, Shape
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import autoshard
from autoshard.capture.joint import capture
from autoshard.cluster.cluster import Cluster
from autoshard.options.target import Settings
from autoshard.planner.planner import Planner
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.problem_builder import ProblemBuilder
from autoshard.solver import CostFrontier, Problem, cost_frontier
from autoshard.specs.axes import MeshShape

DEVICES = 16
BATCH = 256

Example = tuple[nn.Module, dict[str, Tensor]]


class LSTM(nn.Module):
    """`forward(x)` returns the mean square of the last layer's output."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.recurrent(x)[0].square().mean()


def images() -> dict[str, Tensor]:
    return {"images": torch.empty(BATCH, 3, 224, 224), "labels": torch.empty(BATCH, dtype=torch.long)}


def vgg16(depth: float) -> Example:
    stages = ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3))
    return VGG(1000, stages), images()


def wide_resnet(depth: float) -> Example:
    depths = tuple(max(1, round(depth * blocks)) for blocks in (3, 8, 36, 3))
    return ResNet(depths, 352, 1, 1000), images()


def rnn(depth: float) -> Example:
    width = 18432
    return LSTM(max(1, round(10 * depth)), width), {"x": torch.empty(20, BATCH, width)}


def transformer(depth: float) -> Example:
    shape = Shape(layers=max(1, round(12 * depth)), width=4096, heads=32, context=128, vocabulary=8192)
    tokens = torch.empty(BATCH, 128, dtype=torch.long)
    return GPT(shape), {"tokens": tokens, "targets": tokens.clone()}


@dataclass(frozen=True)
class Model:
    """A model of the paper's, and its seconds of FT-LDP, FT-LDP without threads, and FT-Elimination (Table 3)."""

    build: Callable[[float], Example]
    gigabytes: float
    ldp: float | None = None
    alone: float | None = None
    elimination: float | None = None


MODELS = {
    "VGG16": Model(vgg16, 0.52),
    "WideResNet": Model(wide_resnet, 7.3, 1292, 17432, 19666),
    "RNN": Model(rnn, 108, 0.28, 0.40, 1.78),
    "Transformer": Model(transformer, 9.7, 201, 1535, 3030),
}


@dataclass
class Result:
    """What was measured of a model: seconds by what was run, and how many points it found."""

    gigabytes: float
    problem: str
    seconds: dict[str, float] = field(default_factory=dict)
    points: dict[str, str] = field(default_factory=dict)


def problem_of(module: nn.Module, inputs: dict[str, Tensor]) -> Problem:
    """The planner's problem of a training step on 16 devices."""
    graph = capture(module, (), inputs, grad=True)
    mesh = MeshShape.of({"x": DEVICES})
    planner = Planner(graph, mesh, Cluster.of("v100"), Constraints(), Settings())
    builder = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints)
    return builder.build(frozenset({0}), reuse="inputs").problem


def tracked(problem: Problem, options: dict[str, Any]) -> tuple[float, CostFrontier]:
    start = time.process_time()
    found = cost_frontier(problem, **options)
    return time.process_time() - start, found


def measure(model: Model, args: argparse.Namespace) -> Result:
    with torch.device("meta"):
        module, inputs = model.build(args.depth)
    problem = problem_of(module, inputs)
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
    widest = max(map(len, problem.costs))
    shape = f"{problem.size} nodes, {len(problem.edges)} edges, {widest} strategies at most"
    result = Result(parameters / 1e9, shape)
    for name, options in runs(args):
        result.seconds[name], found = tracked(problem, options)
        settled = f", {found.fixed_nodes} settled" if found.fixed_nodes else f", within {found.gap:.2%}"
        result.points[name] = f"{len(found)}{settled}"
    if not args.tracking_only:
        start = time.process_time()
        plans = autoshard.frontier(
            module,
            {"x": DEVICES},
            example_kwargs=inputs,
            cluster="v100",
            gaps=args.gaps,
            search=autoshard.Search(time_limit=args.time_limit),
        )
        result.seconds[WHOLE] = time.process_time() - start
        result.points[WHOLE] = f"{len(plans)}"
        result.seconds[CAPTURE] = plans[0].timings["capture"]
    return result


LDP, ELIMINATION = "FT-LDP", "FT-Elimination"
WHOLE, CAPTURE = "autoshard.frontier", "of it capture"


def runs(args: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    common = {"epsilon": args.epsilon, "limit": args.limit}
    yield LDP, common
    if not args.skip_elimination:
        yield ELIMINATION, common | {"method": "elimination"}


def table(results: dict[str, Result]) -> Table:
    result = Table("", *results, title=f"Frontier tracking, {DEVICES} devices", title_justify="left")
    result.add_row(
        "parameters, GB (paper)", *(f"{r.gigabytes:.2f} ({MODELS[n].gigabytes})" for n, r in results.items())
    )
    result.add_row("problem", *(r.problem for r in results.values()))
    result.add_section()
    for name, paper in ((LDP, ("ldp", "alone")), (ELIMINATION, ("elimination",)), (WHOLE, ()), (CAPTURE, ())):
        if not any(name in r.seconds for r in results.values()):
            continue
        result.add_row(f"{name}, s", *(f"{r.seconds.get(name, float('nan')):.2f}" for r in results.values()))
        if name != CAPTURE:
            result.add_row("   points", *(r.points.get(name, "") for r in results.values()))
        for field_name in paper:
            said = (getattr(MODELS[model], field_name) for model in results)
            label = "   the paper's, 1 thread, s" if field_name == "alone" else "   the paper's, s"
            result.add_row(label, *("-" if seconds is None else f"{seconds:g}" for seconds in said))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append", help="default: all")
    parser.add_argument("--depth", type=float, default=1.0, help="share of the layers of deep models")
    parser.add_argument("--epsilon", type=float, default=0.05, help="share of its time that a point may be off")
    parser.add_argument("--limit", type=int, help="partial plans of one combination of strategies for every gap")
    parser.add_argument("--gaps", type=int, default=2, help="of autoshard.frontier")
    parser.add_argument("--time-limit", type=float, default=300.0, help="of autoshard.frontier, seconds")
    parser.add_argument("--skip-elimination", action="store_true", help="no FT-Elimination")
    parser.add_argument("--tracking-only", action="store_true", help="no autoshard.frontier")
    args = parser.parse_args()
    names = args.model or list(MODELS)
    console = Console(stderr=True)
    results = {name: measure(MODELS[name], args) for name in track(names, "models", console=console, transient=True)}
    Console(width=150).print(table(results))


if __name__ == "__main__":
    main()
