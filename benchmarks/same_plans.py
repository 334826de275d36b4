"""Forty plans before and after a change of the planner: benchmarks/same_plans.py --write FILE | --compare FILE

Small models of the tests on meshes of one to three axes: with memory limits, recomputation, dynamic sizes, shares of
the batch, precisions, hints, local inputs and pipelines. A search takes a count of steps, not of seconds, so that the
plans are the same on every machine. For each plan: the predicted seconds of a step, the bytes of the peak, the lower
bound. `--compare` plans again: it says which plans are slower by more than a millionth, or have a looser bound, and how
long planning took beside what the file says.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import autoshard  # noqa: E402
from tests import models  # noqa: E402
from tests.training import fast_links  # noqa: E402

WORK = 20_000_000
"""Steps of a search, some seconds of it."""

LINE, SQUARE, CUBE = {"dp": 8}, {"dp": 2, "tp": 4}, {"pod": 2, "dp": 2, "tp": 2}
PIPELINE = {"pp": 2, "dp": 2}
TOKENS = {"input_ids": {0: "batch"}, "labels": {0: "batch"}}
STAGES = {"schedule": "1F1B", "microbatches": 2}


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a mesh and the options of its plan; `share` limits memory to so much of what the plan without holds."""

    model: str
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 0.0

    @property
    def name(self) -> str:
        """What tells the case from the others."""
        said = [
            *(f"{key}={value}" for key, value in self.options.items()),
            *([f"limit {self.share}"] * bool(self.share)),
        ]
        return f"{self.model} on {self.mesh}: {', '.join(said) or 'as it is'}"


PLAIN = (
    "mlp",
    "gpt",
    "hf_gpt2",
    "hf_llama",
    "hf_bert",
    "hf_vit",
    "resnet18",
    "hf_t5",
    "hf_mixtral",
    "unet",
    "gnmt",
    "dlrm",
)
CASES = [
    *(Case(model, (LINE, SQUARE, CUBE)[place % 3]) for place, model in enumerate(PLAIN)),
    *(Case(model, SQUARE) for model in ("hf_deepseek_v3", "hf_swin", "hf_whisper", "gshard")),
    *(Case(model, LINE, share=share) for model in ("gpt", "hf_llama", "resnet18") for share in (0.95, 0.85)),
    *(Case(model, SQUARE, {"recompute": "full"}) for model in ("gpt", "hf_bert")),
    *(Case(model, LINE, {"effort": "fast"}) for model in ("hf_llama", "unet")),
    *(Case(model, SQUARE, {"dynamic": TOKENS}) for model in ("gpt", "hf_llama")),
    Case("gpt", {"dp": 2}, {"dynamic": TOKENS, "shares": {"dp": (2, 1)}}),
    Case("mlp", {"tp": 2}, {"shares": {"tp": (3, 1)}, "hints": {"*.weight": {"tp": Shard(0)}}}),
    Case("gpt", SQUARE, {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    Case("hf_bert", SQUARE, {"hints": {"*.query.weight": {"tp": Shard(0)}}}),
    Case("gpt", LINE, {"inputs": "local"}),
    Case("hf_gpt2", SQUARE, {"output_placements": "planned"}),
    Case("gpt", LINE, {"compile": True}),
    Case("hf_llama", SQUARE, {"optimizer": "sgd"}),
    *(Case(model, PIPELINE, STAGES) for model in ("gpt", "hf_llama", "hf_t5", "unet")),
]


def planned(case: Case) -> dict[str, float]:
    """The figures of the plan of a case, and the seconds that planning took, capture among them."""
    module, inputs = models.ZOO[case.model]()
    options: dict[str, Any] = {"cluster": fast_links(), "work_limit": WORK, "time_limit": 600.0, **case.options}
    if case.share:
        options["memory_limit"] = int(autoshard.plan(module, case.mesh, (), inputs, **options).memory.peak * case.share)
    start = time.perf_counter()
    plan = autoshard.plan(module, case.mesh, (), inputs, **options)
    seconds = time.perf_counter() - start
    if isinstance(plan, autoshard.PipelinePlan):  # it says no bound of its own
        return {"step": plan.step_seconds, "peak": max(plan.peaks), "bound": 0.0, "planning": seconds}
    return {"step": plan.step_seconds, "peak": plan.memory.peak, "bound": plan.lower_bound, "planning": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--compare", type=Path)
    parser.add_argument("--only", default="", help="cases whose names hold this text")
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    before = json.loads(asked.compare.read_text("utf-8")) if asked.compare else {}
    found: dict[str, dict[str, float]] = {}
    for case in CASES:
        if asked.only in case.name:
            found[case.name] = planned(case)
            print(case.name, found[case.name], _worse(found[case.name], before.get(case.name)), flush=True)
    if asked.write:
        asked.write.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    common = found.keys() & before.keys()
    if common:
        ratio = sum(found[name]["planning"] for name in common) / sum(before[name]["planning"] for name in common)
        print(f"{len(common)} plans, planning takes {ratio:.2f} of what it took")
        sys.exit(any(_worse(found[name], before[name]) for name in common))


def _worse(now: dict[str, float], before: dict[str, float] | None) -> str:
    """What is worse than before, in words; nothing where nothing is."""
    if before is None:
        return ""
    slower = now["step"] > before["step"] * (1 + 1e-6)
    looser = now["bound"] < before["bound"] * (1 - 1e-6)
    return " and ".join(["slower"] * slower + ["a looser bound"] * looser)


if __name__ == "__main__":
    main()
