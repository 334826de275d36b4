"""Our plans beside those of experts, by the same prices: python benchmarks/plan_quality.py [--model NAME] [--mesh 8]

Models of real width, cut to a few layers, on (8,) and (8, 8) H100s, planned freely and as an expert would lay them out:
data parallel, ZeRO-3, Megatron with and without sequence parallelism, expert parallel, a split classifier, and on two
axes the products of these with data parallelism. An expert's plan is made by the same planner, which then has nothing
left to choose (`experts.py`). Prints predicted seconds, cost, bytes sent and peak memory per device of each, and the
ratios to ours.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import architectures
import torch
from architectures import Example
from experts import Roles, expert_plan
from rich.console import Console
from rich.table import Table

import autoshard

MESHES = {"8": {"x": 8}, "8x8": {"dp": 8, "tp": 8}}


@dataclass(frozen=True)
class Case:
    """One model to plan: `build(batch)` makes it, `batch` is for eight devices."""

    build: Callable[..., Example]
    batch: int
    layers: str
    roles: Roles
    experts: tuple[str, ...]


LLAMA = Roles(
    column=dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.up_proj"), (0, 1)),
    row={"*.o_proj": 1, "*.down_proj": 1},
    vocabulary=("*embed_tokens", "*lm_head"),
)
GPT2 = Roles(
    column={"*.c_attn": (1, 3), "*.c_fc": (1, 1)},
    row={"*.c_proj": 0},
    vocabulary=("*.wte", "lm_head"),
)
VIT = Roles(
    column=dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj", "*.fc1"), (0, 1)),
    row={"*.o_proj": 1, "*.fc2": 1},
)
MIXTRAL = Roles(
    column=dict.fromkeys(("*.q_proj", "*.k_proj", "*.v_proj"), (0, 1)),
    row={"*.o_proj": 1},
    vocabulary=("*embed_tokens", "*lm_head"),
    experts=("*.experts.*",),
)
GSHARD = Roles(experts=("*.moe.up", "*.moe.down"))
CLASSIFIER = Roles(vocabulary=("classifier",))

_PLAIN = ("DDP", "ZeRO-3")
_DENSE = (*_PLAIN, "Megatron", "Megatron SP")
_BUILD = functools.partial
CASES = {
    "GPT-2 medium": Case(_BUILD(architectures.gpt2_medium, layers=4), 64, "4 of 24 layers", GPT2, _DENSE),
    "Llama-3-8B": Case(_BUILD(architectures.llama3_8b, layers=4), 8, "4 of 32 layers", LLAMA, _DENSE),
    "Llama-3-8B, one sequence": Case(_BUILD(architectures.llama3_8b, layers=4), 1, "4 of 32 layers", LLAMA, _DENSE),
    "Mixtral-8x7B": Case(
        _BUILD(architectures.mixtral_8x7b, layers=2), 8, "2 of 32 layers", MIXTRAL, (*_PLAIN, "expert")
    ),
    "GShard": Case(_BUILD(architectures.gshard, layers=2), 8, "2 layers", GSHARD, (*_PLAIN, "expert")),
    "ViT-L": Case(_BUILD(architectures.vit_large, layers=4), 512, "4 of 24 layers", VIT, (*_PLAIN, "Megatron")),
    "ResNet-50, 100k classes": Case(
        architectures.resnet50, 256, "all layers", CLASSIFIER, (*_PLAIN, "split classifier")
    ),
    "Wide-ResNet-50": Case(architectures.wide_resnet, 64, "all layers", CLASSIFIER, _PLAIN),
    "U-Net": Case(architectures.unet, 128, "3 levels", Roles(), _PLAIN),
}


@dataclass(frozen=True)
class Row:
    """What one plan costs one device."""

    name: str
    step: float
    cost: float
    bytes: float
    peak: int

    @staticmethod
    def of(name: str, plan: autoshard.ShardingPlan) -> Row:
        return Row(name, plan.step_seconds, plan.cost, bytes_sent(plan), plan.memory.peak)


def bytes_sent(plan: autoshard.ShardingPlan) -> float:
    """Bytes that one device sends in a step, by ring collectives."""
    sizes = {axis.name: axis.size for axis in plan.mesh.axes}
    total = 0.0
    for record in plan.collectives:
        others = sizes[record.axis] - 1
        share = {"all_gather": others, "all_reduce": 2 * others / (others + 1)}
        total += record.count * record.bytes * share.get(record.kind, others / (others + 1))
    return total


def free_plan(case: Case, mesh: Mapping[str, int], options: Mapping[str, Any]) -> autoshard.ShardingPlan:
    module, inputs = case.build(batch=case.batch)
    return autoshard.plan(module, mesh, (), inputs, output_placements="planned", **options)


def lay_outs(case: Case, mesh: Mapping[str, int]) -> Iterator[tuple[str, ...]]:
    """What experts would try: one scheme on one axis, data parallelism times one of them on two."""
    for name in case.experts:
        if len(mesh) == 1:
            yield (name,)
        else:
            yield ("DDP", name)
            if name != "DDP":
                yield ("ZeRO-3", name)


def compare(name: str, case: Case, mesh: Mapping[str, int], options: Mapping[str, Any]) -> tuple[list[Row], list[str]]:
    """Our plan first, then the experts'; and what could not be laid out, and why."""
    rows, failures = [Row.of("autoshard", free_plan(case, mesh, options))], []
    for schemes in lay_outs(case, mesh):
        said = " × ".join(dict.fromkeys(schemes))
        try:
            rows.append(
                Row.of(said, expert_plan(case.build(batch=case.batch), case.batch, case.roles, schemes, mesh, options))
            )
        except autoshard.AutoshardError as error:
            failures.append(f"{said}: {error}")
    return rows, failures


def ratio(rows: list[Row]) -> float:
    """Our predicted step over that of the best expert."""
    return rows[0].step / min(row.step for row in rows[1:])


def table(title: str, rows: list[Row]) -> Table:
    result = Table("", "step, ms", "cost, ms", "sent, MB", "peak, GiB", "step / ours", "cost / ours", title=title)
    ours = rows[0]
    for row in rows:
        ratios = (f"{row.step / ours.step:.3f}", f"{row.cost / ours.cost:.3f}")
        figures = (f"{1e3 * row.step:.2f}", f"{1e3 * row.cost:.2f}", f"{row.bytes / 1e6:.0f}")
        result.add_row(row.name, *figures, f"{row.peak / 2**30:.1f}", *ratios)
    best = min(rows[1:], key=lambda row: row.step)
    result.caption = f"ours / best expert ({best.name}): {ratio(rows):.3f} by step"
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=CASES, action="append", help="default: all")
    parser.add_argument("--mesh", choices=MESHES, action="append", help="default: both")
    parser.add_argument("--batch", type=int, help="for eight devices; more devices get more")
    parser.add_argument("--cluster", default="h100")
    parser.add_argument("--memory", help="budget per device, such as 70GiB; default: none")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for the solver, per plan")
    args = parser.parse_args()

    torch.set_num_threads(1)
    console = Console(width=120)
    worst = 0.0
    options = {
        "cluster": args.cluster,
        "memory_limit": args.memory,
        "search": autoshard.Search(time_limit=args.time_limit),
    }
    for name in args.model or CASES:
        for mesh_name in args.mesh or MESHES:
            mesh, case = MESHES[mesh_name], CASES[name]
            batch = (args.batch or case.batch) * (8 if len(mesh) > 1 else 1)
            case = dataclasses.replace(case, batch=batch)
            rows, failures = compare(name, case, mesh, options)
            console.print(table(f"{name}, {case.layers}, batch {batch}, mesh {tuple(mesh.values())}", rows))
            worst = max(worst, ratio(rows))
            for failure in failures:
                console.print(failure)
    console.print(f"largest ratio of all: {worst:.4f}")


if __name__ == "__main__":
    main()
