"""The search for the mesh beside hand-made plans: python benchmarks/search.py [--case NAME] [--quick] [--no-grid]

For each case: seconds of `autoshard.search` and its best plan; and a grid of hand-made plans, pp stages by dp replicas
by tp parts, with the predicted seconds of their steps. A hand-made plan has the parameters where an expert would put
them (Megatron over tp, replicated or in ZeRO-3's shards over dp), four microbatches per stage, and one stage per rank;
all else, and the schedule, is chosen as in any plan. `--quick` takes fewer layers, `--no-grid` leaves the grid out.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import architectures
import torch
import transformers
from architectures import Example
from experts import Roles, Scheme
from plan_quality import GPT2, GSHARD, LLAMA
from rich.console import Console
from rich.table import Table

import autoshard

_QUICK = 4
_PER_STAGE = 4


@dataclass(frozen=True)
class Case:
    """What is searched for: `build(layers)` makes the model and a call with the whole batch."""

    build: Callable[[int], Example]
    layers: int
    batch: int
    devices: int
    cluster: str
    roles: Roles
    time_limit: float = 100.0


def gpt(layers: int) -> Example:
    """GPT-2.7B (Rhino, Table 1): width 2560, 32 heads; sequences of 1024, the vocabulary padded to 51200; float32."""
    config = transformers.GPT2Config(
        vocab_size=51200,
        n_positions=1024,
        n_embd=2560,
        n_layer=layers,
        n_head=32,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    return language_model(transformers.GPT2LMHeadModel(config), torch.float32, 64, 1024)


def mixture(layers: int) -> Example:
    """MoE-16E-1.3B (Rhino, Table 2): width 768, 16 heads, 16 experts of 6144 in every layer; float32.

    Sequences of 1024 and a vocabulary of 32000 are not told there.
    """
    return language_model(architectures.GShard(768, 16, 6144, 16, layers, 32000), torch.float32, 256, 1024)


def llama(layers: int) -> Example:
    """Llama-3.1-405B: width 16384, 128 query heads over 8 of keys and values; sequences of 8192; bfloat16."""
    config = transformers.LlamaConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=layers,
        num_attention_heads=128,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_theta=500000.0,
        use_cache=False,
    )
    return language_model(LossAlone(transformers.LlamaForCausalLM(config)), torch.bfloat16, 2048, 8192)


class LossAlone(torch.nn.Module):
    """A model of transformers that returns nothing but its loss: its logits, which nobody reads, would be terabytes."""

    def __init__(self, model: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=input_ids, labels=labels).loss


def language_model(module: torch.nn.Module, dtype: torch.dtype, batch: int, sequence: int) -> Example:
    tokens = torch.empty(batch, sequence, dtype=torch.long)
    return module.to(dtype).train(), {"input_ids": tokens, "labels": tokens.clone()}


_UNLIKE = "8xV100-32GB + 8xP100-16GB"
CASES = {
    "GPT-2.7B, 16 V100": Case(gpt, 32, 64, 16, "v100", GPT2),
    "GPT-2.7B, 8 V100 + 8 P100": Case(gpt, 32, 64, 16, _UNLIKE, GPT2),
    "MoE-16E-1.3B, 16 V100": Case(mixture, 16, 256, 16, "v100", GSHARD),
    "MoE-16E-1.3B, 8 V100 + 8 P100": Case(mixture, 16, 256, 16, _UNLIKE, GSHARD),
    "Llama-405B, 1024 H100": Case(llama, 126, 2048, 1024, "h100", LLAMA, 400.0),
}


def grid(case: Case) -> Iterator[dict[str, int]]:
    """Stages, replicas and parts that make up all devices; the parts of a layer share a host."""
    for stages in (number for number in range(1, 17) if case.devices % number == 0):
        for parts in (1, 2, 4, 8):
            replicas = case.devices // (stages * parts)
            if stages * replicas * parts == case.devices and replicas <= case.batch:
                yield {"pp": stages, "dp": replicas, "tp": parts}


def hand_made(case: Case, layers: int, sizes: dict[str, int], over_replicas: str) -> autoshard.ShardingPlan:
    """The plan of one point of the grid; `over_replicas` says how parameters lie there: `"DDP"` or `"ZeRO-3"`."""
    with torch.device("meta"):
        module, inputs = case.build(layers)
    mesh = {name: size for name, size in sizes.items() if size > 1}
    names = {"dp": over_replicas, "tp": "expert" if case.roles.experts else "Megatron"}
    schemes = [
        Scheme(name, case.roles, sizes[axis], sizes["dp"] * sizes["tp"], case.batch)
        for axis, name in names.items()
        if axis in mesh
    ]
    hints = {
        name: tuple(scheme.parameter(name, parameter.shape) for scheme in schemes)
        for name, parameter in module.named_parameters()
    }
    pipeline = autoshard.Pipeline()
    if "pp" in mesh:
        number = min(_PER_STAGE * sizes["pp"], max(case.batch // sizes["dp"], 1))
        pipeline = autoshard.Pipeline(microbatches=number, virtual=1)
    return autoshard.plan(
        module, mesh, (), inputs, hints=hints if schemes else None, cluster=case.cluster,
        search=autoshard.Search(effort="fast"), pipeline=pipeline
    )  # fmt: skip


def peak_of(plan: autoshard.ShardingPlan) -> int:
    return max(plan.peaks) if hasattr(plan, "peaks") else plan.memory.peak


def searched(case: Case, layers: int, console: Console) -> float:
    """Search, and say what was found; returns seconds of its step."""
    with torch.device("meta"):
        module, inputs = case.build(layers)
    start, busy = time.perf_counter(), time.process_time()
    result = autoshard.search(
        module,
        case.devices,
        (),
        inputs,
        cluster=case.cluster,
        search=autoshard.Search(time_limit=case.time_limit, effort="fast"),
    )
    seconds, used = time.perf_counter() - start, time.process_time() - busy
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    console.print(str(result), highlight=False)
    console.print(f"searched in {seconds:.0f} s ({used:.0f} s of one core), {held:.1f} GiB: {result.mesh}")
    return result.best.seconds or float("inf")


def compared(case: Case, layers: int, ours: float) -> Table:
    """All points of the grid, the fastest first."""
    table = Table("pp", "dp", "tp", "over dp", "step", "peak GiB", "ours over it")
    rows = []
    for sizes in grid(case):
        for scheme in ("DDP", "ZeRO-3") if sizes["dp"] > 1 else ("DDP",):
            try:
                plan = hand_made(case, layers, sizes, scheme)
            except autoshard.AutoshardError as error:
                rows.append((float("inf"), (*map(str, sizes.values()), scheme, "none", "", str(error)[:60])))
                continue
            ratio = f"{ours / plan.step_seconds:.4f}" if plan.fits else "does not fit"
            cells = (
                *map(str, sizes.values()),
                scheme,
                f"{plan.step_seconds:.4g}",
                f"{peak_of(plan) / 2**30:.1f}",
                ratio,
            )
            rows.append((plan.step_seconds, cells))
    for _, cells in sorted(rows):
        table.add_row(*cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--quick", action="store_true", help=f"{_QUICK} layers")
    parser.add_argument("--no-grid", action="store_true", help="search alone")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=140)
    for name in args.case or CASES:
        case = CASES[name]
        layers = _QUICK if args.quick else case.layers
        console.rule(f"{name}, {layers} layers, batch {case.batch}")
        ours = searched(case, layers, console)
        if not args.no_grid:
            console.print(compared(case, layers, ours))


if __name__ == "__main__":
    main()
