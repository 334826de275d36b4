"""Planning time of Llama for H100s: python benchmarks/planning.py [--mesh 8x8] [--model 405B] [--effort fast full]

Llama-3-8B on meshes (8,), (8, 8) and (2, 4, 8), and with --model 405B the shape of Llama-3-405B on (8, 16), from a
module on the meta device, each in a process of its own so that its peak memory is its own. Prints the seconds of
capture and of each later phase, their ratio, the peak resident memory, the cost of the plan and the lower bound;
--memory gives a limit per device, one that forces parameters to be sharded if it is small; --effort compares efforts,
and --method ways to search: `--memory 12GiB --method auto force` sets the full search under a limit beside the quick
one that forces the largest parameters to be sharded and does nothing else (Rhino 4.4). `--model 405B --layers 32 126
--repeats 5` plans depths in turn, and tells the median of each.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

import autoshard
from autoshard.options import METHODS

MESHES = {"8": {"x": 8}, "8x8": {"dp": 8, "tp": 8}, "2x4x8": {"pod": 2, "dp": 4, "tp": 8}, "8x16": {"dp": 8, "tp": 16}}
SHAPES = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    "405B": {"hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128},
}
USUAL = {"8B": ("8", "8x8", "2x4x8"), "405B": ("8x16",)}


def llama(layers: int | None = None, model: str = "8B") -> LlamaForCausalLM:
    """The shape of a Llama 3 on the meta device, bfloat16; `layers` of them, or as many as it has."""
    shape = SHAPES[model] | ({} if layers is None else {"num_hidden_layers": layers})
    config = LlamaConfig(
        **shape,
        vocab_size=128256,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def measure(mesh: str, effort: str, method: str, layers: int | None, args: argparse.Namespace) -> dict[str, Any]:
    """Plan once in this process."""
    with torch.device("meta"):
        tokens = torch.empty(args.batch, args.sequence, dtype=torch.long)
    try:
        plan = autoshard.plan(
            llama(layers, args.model),
            MESHES[mesh],
            example_kwargs={"input_ids": tokens, "labels": tokens},
            cluster="h100",
            memory_limit=args.memory,
            search=autoshard.Search(method=method, time_limit=args.time_limit, effort=effort),
        )
    except autoshard.BudgetError as error:
        return {"least_bytes": error.peak}
    if args.save:
        plan.save(f"{args.save}-{mesh}-{effort}-{method}.json")
    return {
        "timings": dict(plan.timings),
        "cost": plan.cost,
        "step": plan.step_seconds,
        "found_by": plan.method,
        "lower_bound": plan.lower_bound,
        "gap": plan.gap,
        "peak_device_bytes": plan.memory.peak,
        "resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_own_process(mesh: str, effort: str, method: str, layers: str, arguments: list[str]) -> dict[str, Any]:
    command = [sys.executable, __file__, *arguments, "--measure", mesh, effort, method, layers]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def median(plans: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan that took a median time after its capture, of several equal ones."""
    if "timings" not in plans[0]:
        return plans[0]
    middle = statistics.median_low(after_capture(plan["timings"]) for plan in plans)
    return next(plan for plan in plans if after_capture(plan["timings"]) == middle)


def table(results: dict[str, dict[str, Any]]) -> Table:
    plans = [one for one in results.values() if "timings" in one]
    phases = dict.fromkeys(phase for plan in plans for phase in plan["timings"])
    result = Table("", *results)

    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> None:
        result.add_row(name, *(cell(one) if one in plans else "" for one in results.values()))

    for phase in phases:
        row(f"{phase}, s", lambda one, phase=phase: f"{one['timings'].get(phase, 0.0):.2f}")
    result.add_section()
    row("after capture, s", lambda one: f"{after_capture(one['timings']):.2f}")
    row("after capture / capture", lambda one: f"{after_capture(one['timings']) / one['timings']['capture']:.2f}")
    row("found by", lambda one: one["found_by"])
    row("predicted step, s", lambda one: f"{one['step']:.4f}")
    row("cost, s per step", lambda one: f"{one['cost']:.4f}")
    row("lower bound", lambda one: f"{one['lower_bound']:.4f}")
    row("gap", lambda one: f"{one['gap']:.2%}")
    row("plan's peak per device, GiB", lambda one: f"{one['peak_device_bytes'] / 2**30:.1f}")
    row("planner's own peak, GiB", lambda one: f"{one['resident_bytes'] / 2**30:.2f}")
    if len(plans) < len(results):
        least = (one.get("least_bytes") for one in results.values())
        result.add_row("does not fit: least peak, GiB", *("" if one is None else f"{one / 2**30:.1f}" for one in least))
    return result


def after_capture(timings: dict[str, float]) -> float:
    """Seconds of all phases but capture."""
    return sum(seconds for phase, seconds in timings.items() if phase not in ("capture", "total"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mesh", choices=MESHES, action="append", help="default: 8, 8x8 and 2x4x8; of 405B, 8x16")
    parser.add_argument("--model", choices=SHAPES, default="8B")
    parser.add_argument("--layers", type=int, nargs="+", help="default: the model's")
    parser.add_argument("--repeats", type=int, default=1, help="plans of each kind, made in turn")
    parser.add_argument("--effort", choices=("fast", "full"), nargs="+", default=["full"])
    parser.add_argument("--batch", type=int, default=8, help="sequences in the global batch")
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--memory", help="budget per device, such as 70GiB; default: none")
    parser.add_argument("--method", choices=METHODS, nargs="+", default=["auto"])
    parser.add_argument("--time-limit", type=float, default=240.0, help="seconds for the solver")
    parser.add_argument("--save", metavar="PREFIX", help="save each plan as PREFIX-<mesh>-<effort>-<method>.json")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()

    if args.measure:
        mesh, effort, method, layers = args.measure
        print(json.dumps(measure(mesh, effort, method, int(layers) if layers else None, args)))
        return
    kinds = list(itertools.product(args.mesh or USUAL[args.model], args.effort, args.method, args.layers or [""]))
    made: dict[str, list[dict[str, Any]]] = {}
    for mesh, effort, method, layers in kinds * args.repeats:
        depth = f", {layers} layers" if layers else ""
        plan = in_own_process(mesh, effort, method, str(layers), sys.argv[1:])
        made.setdefault(f"({', '.join(mesh.split('x'))}), {effort}, {method}{depth}", []).append(plan)
    Console(width=120).print(table({name: median(plans) for name, plans in made.items()}))


if __name__ == "__main__":
    main()
