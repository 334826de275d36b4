"""Predicted against measured seconds of random plans: torchrun --nproc-per-node 2 benchmarks/cost_model.py [--quick]

`python benchmarks/cost_model.py --compute` looks at compute alone: the whole of every model on one process, predicted
and measured in seconds of the processor, which do not depend on what else the machine does.

Calibrates the machine, then, for each of six small models, draws random plans, which lie between the planner's own and
any that there are, predicts their steps and runs them, one step of each in turn, so that all meet the same machine. A
step is the forward and backward half of the local program that `parallelize` would run, without optimizer. Prints for
every model

* step: error of the predicted step (`planner.schedule`, which replays the program's own calls);
* noise: difference between the means of even and of odd rounds: what no prediction can be better than;
* shape: a machine that is slower or faster now than when it was calibrated shifts all plans alike. This is the mean
  error of the step when every prediction of a model is multiplied by one number, the median of measured over
  predicted, and this number;
* collectives: the same for the sum of a plan's collectives, run one after another, each behind a short stretch of
  compute, whose time is taken off;
* rank: Spearman's correlation of predictions and of the odd rounds with the even rounds.

What is measured is the mean of all rounds, in which none counts as more than three medians, as calibration has it.
Errors are relative, mean and worst.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from gpt import GPT, Shape  # noqa: E402

from autoshard.capture.joint import capture  # noqa: E402
from autoshard.cluster.calibrate import (  # noqa: E402
    Bench,
    Stopwatch,
    calibrate,
    robust_mean,
)
from autoshard.cluster.cluster import Cluster  # noqa: E402
from autoshard.cluster.measurements import Measurements  # noqa: E402
from autoshard.cluster.samples import chain_calls, make_blocking, make_collective, make_matmul  # noqa: E402
from autoshard.options.target import Settings  # noqa: E402
from autoshard.patterns.decisions import Decisions, Flow  # noqa: E402
from autoshard.planner.planner import Planner  # noqa: E402
from autoshard.planner.planning_problem import Constraints  # noqa: E402
from autoshard.planner.problem_builder import ProblemBuilder  # noqa: E402
from autoshard.program.localize import localize  # noqa: E402
from autoshard.program.program_replay import collective_calls, operations  # noqa: E402
from autoshard.program.split import split  # noqa: E402
from autoshard.runtime.step import Ranks, RunnableStep  # noqa: E402
from autoshard.simulate.events import COMPUTE, replay  # noqa: E402
from autoshard.specs.axes import MeshShape  # noqa: E402
from tests import gloo  # noqa: E402
from tests.models import resnet18  # noqa: E402
from tests.random_plans import random_assignment  # noqa: E402

Example = tuple[nn.Module, dict[str, Tensor]]
COMPUTE_BEFORE = make_matmul(torch.device("cpu"))
MESHES = {2: {"x": 2}, 4: {"x": 2, "y": 2}}


def gpt() -> Example:
    shape = Shape(layers=2, width=256, context=64)
    tokens = torch.randint(shape.vocabulary, (8, shape.context))
    return GPT(shape), {"tokens": tokens, "targets": tokens}


def mlp() -> Example:
    class Regression(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.Tanh()) for _ in range(4)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x).square().mean()

    return Regression(), {"x": torch.rand(512, 512)}


def resnet() -> Example:
    return resnet18(batch=16, size=96)


def _tokens(build: Callable[[], nn.Module]) -> Example:
    tokens = torch.randint(512, (8, 64))
    return build(), {"input_ids": tokens, "labels": tokens}


def gpt2() -> Example:
    config = transformers.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=192, n_layer=2, n_head=6, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
        use_cache=False,
    )  # fmt: skip
    return _tokens(lambda: transformers.GPT2LMHeadModel(config))


def llama() -> Example:
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    return _tokens(lambda: transformers.LlamaForCausalLM(config))


def bert() -> Example:
    config = transformers.BertConfig(
        vocab_size=512, hidden_size=192, num_hidden_layers=2, num_attention_heads=6, intermediate_size=768,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    return _tokens(lambda: transformers.BertForMaskedLM(config))


MODELS: dict[str, Callable[[], Example]] = {one.__name__: one for one in (mlp, gpt, gpt2, llama, bert, resnet)}


@dataclass(slots=True)
class Run:
    """A plan's program, what was predicted of it, and what was measured."""

    program: RunnableStep
    locals_: list[Tensor]
    collectives: list[Callable[[], object]]
    predicted: float
    sent: float
    steps: list[float] = field(default_factory=list)
    sendings: list[float] = field(default_factory=list)

    def step(self) -> None:
        _, saved = self.program.forward(self.locals_, {})
        self.program.backward(
            list(saved), [_like(border, self.program.ranks.mesh) for border in self.program.step.tangents], {}
        )

    def send(self) -> None:
        for one in self.collectives:
            one()


def _like(border: object, mesh: MeshShape) -> Tensor:
    """Any tensor of a border's local shape: the time does not depend on the numbers."""
    shape, dtype = border.local_shape(mesh), border.dtype  # type: ignore[attr-defined]
    return torch.rand(shape, dtype=dtype) if dtype.is_floating_point else torch.zeros(shape, dtype=dtype)


def runs(example: Example, mesh: DeviceMesh, cluster: Cluster, plans: int, seed: int) -> list[Run]:
    """Random plans of a model, ready to run, and their predictions; the planner's own plan is the first.

    Every other one keeps a share of the first one's decisions, from nearly all to none: plans that are all drawn
    without that are about as slow as one another.
    """
    module, inputs = example
    shape, ranks = MeshShape.of(mesh), Ranks(mesh, torch.device("cpu"))
    planner = Planner(capture(module, (), inputs), shape, cluster, Constraints(), Settings())
    built = ProblemBuilder(planner.rules, planner.tables, planner.resharder, planner.constraints).build(
        frozenset(range(shape.ndim)), None
    )
    generator = np.random.default_rng(seed)
    best = built.encode(planner.solve(planner.constraints).decisions)
    shares = np.linspace(1.0, 0.0, plans)
    chosen = [random_assignment(built.problem, generator, best, float(share)) for share in shares]
    return [_run(planner, built.decode(one), mesh, ranks) for one in chosen]


def _run(planner: Planner, decisions: Decisions, mesh: DeviceMesh, ranks: Ranks) -> Run:
    step = localize(Flow(planner.rules, decisions, planner.mesh), planner.resharder, ranks.groups)
    halves = split(step, compile=False)
    issued = operations(halves.graphs, ranks.groups, planner.prices)
    groups = [mesh.get_group(axis) for axis in range(planner.mesh.ndim)]
    return Run(
        program=RunnableStep(step, halves, ranks),
        locals_=[_like(border, ranks.mesh) for border in step.inputs if border.kind != "tangent"],
        collectives=[
            chain_calls(
                COMPUTE_BEFORE, make_blocking(make_collective(one.kind, one.bytes, groups[one.axis], ranks.device))
            )
            for one in collective_calls(halves.graphs, ranks.groups)
        ],
        predicted=replay(issued).seconds_with_contention(planner.cluster.contention),
        sent=sum(one.seconds for one in issued if one.stream != COMPUTE),
    )


def compute_alone(names: Sequence[str], console: Console) -> None:
    """Predicted and measured processor seconds of whole models on one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("x",))
    with torch.no_grad():
        bench = Bench(Stopwatch(torch.device("cpu"), 5, 0.03, time.thread_time), lambda what: console.print(what))
        measured = Measurements(1, {}, dict(bench.operators(torch.float32)))
    cluster = dataclasses.replace(Cluster.preset("cpu"), measured=measured)
    table = Table("model", "measured, ms", "predicted, ms", "predicted over measured")
    for name in names:
        torch.manual_seed(0)
        [one] = runs(MODELS[name](), mesh, cluster, 1, 0)
        for _ in range(10):
            start = time.thread_time()
            one.step()
            one.steps.append(time.thread_time() - start)
        step = robust_mean(one.steps[1:])
        table.add_row(name, f"{1e3 * step:.1f}", f"{1e3 * one.predicted:.1f}", f"{one.predicted / step:.2f}")
    console.print(table)
    dist.destroy_process_group()


def timed(work: Callable[[], object]) -> float:
    """Seconds until the last rank is done."""
    dist.barrier()
    start = time.perf_counter()
    work()
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def measure(found: Sequence[Run], rounds: int) -> None:
    """A step and the collectives of every plan in turn, `rounds` times after one that warms up."""
    for number in range(rounds + 1):
        for one in found:
            step, sending = timed(one.step), timed(one.send)
            computing = timed(chain_calls(*[COMPUTE_BEFORE] * len(one.collectives)))
            if number:
                one.steps.append(step)
                one.sendings.append(sending - computing)


def spearman(left: Sequence[float], right: Sequence[float]) -> float:
    """Correlation of the ranks."""
    ranks = [np.argsort(np.argsort(values)) for values in (left, right)]
    return float(np.corrcoef(*ranks)[0, 1])


def errors(predicted: Sequence[float], measured: Sequence[float]) -> tuple[float, float]:
    """Mean and worst relative error."""
    every = [abs(one - true) / true for one, true in zip(predicted, measured, strict=True)]
    return statistics.mean(every), max(every)


def shape(predicted: Sequence[float], measured: Sequence[float]) -> str:
    """Mean error once all predictions are multiplied by the median of measured over predicted, and this factor."""
    factor = statistics.median(true / one for one, true in zip(predicted, measured, strict=True))
    return f"{errors([factor * one for one in predicted], measured)[0]:.0%} ×{factor:.2f}"


def row(name: str, found: Sequence[Run]) -> list[str]:
    steps = [robust_mean(one.steps) for one in found]
    even, odd = [robust_mean(one.steps[::2]) for one in found], [robust_mean(one.steps[1::2]) for one in found]
    sendings = [(one.sent, robust_mean(one.sendings)) for one in found if one.collectives]
    predicted = [one.predicted for one in found]
    pairs = [errors(predicted, steps), errors(odd, even)]
    ranks = [spearman(predicted, steps), spearman(odd, even)]
    return [
        name,
        f"{1e3 * min(steps):.0f}-{1e3 * max(steps):.0f}",
        *(f"{mean:.0%} {worst:.0%}" for mean, worst in pairs),
        shape(predicted, steps),
        shape(*zip(*sendings, strict=True)),
        " ".join(f"{one:.2f}" for one in ranks),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two models, five plans, four rounds")
    parser.add_argument("--compute", action="store_true", help="compute alone, on one process, without torchrun")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--plans", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cluster", help="a profile measured before, instead of a calibration")
    args = parser.parse_args()
    if args.quick:
        args.models, args.plans, args.rounds = args.models[:2], 5, 4
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if args.compute:
        compute_alone(args.models, Console(width=130))
        return
    dist.init_process_group(gloo.register())
    sizes = MESHES.get(dist.get_world_size(), {"x": dist.get_world_size()})
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    console = Console(width=130, quiet=dist.get_rank() > 0)
    cluster = (
        Cluster.of(args.cluster)
        if args.cluster
        else calibrate(mesh, largest="16MiB", dtypes=(), progress=lambda what: console.print(f"measuring {what}"))
    )
    table = Table(
        "model", "steps, ms", "step", "noise", "shape", "collectives", "rank",
        title=f"{args.plans} random plans on {sizes}, contention {cluster.contention:.2f}; errors: mean, worst",
    )  # fmt: skip
    for name in args.models:
        torch.manual_seed(0)
        found = runs(MODELS[name](), mesh, cluster, args.plans, args.seed)
        measure(found, args.rounds)
        cells = row(name, found)
        console.print("  ".join(cells), markup=False)
        table.add_row(*cells)
    console.print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
