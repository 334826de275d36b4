"""Thirty pipelines before and after a change of their planner: pipelines.py --write FILE | --compare FILE

Models of the tests on two to eight pipeline ranks: decoders, encoders with decoders, convolutions with skips, routed
experts, two towers, tied weights; every schedule, unequal devices, memory limits, precisions, stages on meshes. For
each plan: seconds of a step, the schedule, microbatches and stages per rank, the share of time in which ranks do not
compute, the largest peak in bytes, and the processor seconds of planning, captures among them. `--compare` plans again
and says which steps are longer by more than a millionth, or which peaks of equal steps are larger.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import autoshard  # noqa: E402
from tests import models  # noqa: E402
from tests.option_groups import grouped  # noqa: E402
from tests.pipeline.small_pipelines import tied, tower  # noqa: E402
from tests.training import fast_links, unlike_devices  # noqa: E402

BATCH = 8
WORK = 20_000_000


@dataclass(frozen=True, slots=True)
class Case:
    """A model, a mesh, the options of its pipeline, and its memory limit as a part of the peak without one."""

    model: str
    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    share: float = 0.0

    @property
    def name(self) -> str:
        """What tells the case from the others."""
        said = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return f"{self.model} on {self.mesh}: {said}{f' limit {self.share}' if self.share else ''}"


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
CASES = [
    *(Case("gpt", {"pp": ranks}) for ranks in (2, 4)),
    *(Case("gpt", {"pp": 2}, {"schedule": name, "microbatches": 4}) for name in ("GPipe", "1F1B")),
    *(Case("gpt", {"pp": 2}, {"schedule": name, "virtual": 2}) for name in ("Interleaved1F1B", "LoopedBFS")),
    *(Case("gpt", {"pp": 2}, {"schedule": name}) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "custom")),
    Case("hf_llama", {"pp": 8}, {"microbatches": 8}),
    Case("hf_llama", {"pp": 2, "dp": 2}),
    Case("hf_llama", {"pp": 2, "dp": 2, "tp": 2}, {"schedule": "1F1B", "microbatches": 4}),
    Case("hf_llama", {"pp": 4}, {"mp_policy": BF16}),
    Case("hf_gpt2", {"pp": 2}),  # its head is tied
    Case("hf_gpt2", {"pp": 4, "dp": 2}, {"mp_policy": BF16}),
    Case("tied", {"pp": 2}, {"microbatches": 2}),
    Case("hf_t5", {"pp": 2, "dp": 2}),  # its embeddings are tied
    Case("hf_t5", {"pp": 4}, {"microbatches": 4}),
    Case("unet", {"pp": 2}),
    Case("unet", {"pp": 4}, {"microbatches": 4}),
    Case("hf_mixtral", {"pp": 2}, {"microbatches": 2}),
    Case("hf_mixtral", {"pp": 2, "ep": 2}, {"schedule": "1F1B", "microbatches": 4}),
    Case("hf_clip", {"pp": 2}),
    Case("hf_clip", {"pp": 3}, {"microbatches": 4}),
    Case("hf_bert", {"pp": 3}, {"microbatches": 4}),
    Case("resnet18", {"pp": 2}, {"microbatches": 2}),
    Case("gpt", {"pp": 2}, share=0.8),
    Case("hf_llama", {"pp": 2, "dp": 2}, share=0.85),
    Case("gpt", {"pp": 2}, {"cluster": "unlike"}),
    Case("tower", {"pp": 2}, {"cluster": "unlike"}),
    Case("hf_whisper", {"pp": 2}, {"recompute": "full"}),
]


def build(name: str) -> tuple[torch.nn.Module, Any]:
    """The module, and the keyword arguments of a call with a batch that many numbers divide."""
    if name == "tied":
        return tied()
    if name == "tower":
        return tower()
    return models.ZOO[name](batch=BATCH)


def answer(case: Case, limit: int | None = None) -> dict[str, Any]:
    """The plan of a case; `limit` is that of an earlier answer."""
    module, inputs = build(case.model)
    options = {"cluster": fast_links(), "work_limit": WORK, "time_limit": 600.0, **case.options}
    if options["cluster"] == "unlike":
        options["cluster"] = unlike_devices()
    options = grouped(options)

    def plan() -> Any:
        return autoshard.plan(module, case.mesh, (), inputs, **options)

    if case.share:
        limit = limit or int(max(plan().peaks) * case.share)
        options["memory_limit"] = limit
    start = time.process_time()
    try:
        planned = plan()
    except Exception as error:  # the other pipelines are planned all the same
        return {"refused": f"{type(error).__name__}: {error}"[:200], "limit": limit, "seconds": 0.0}
    return {
        "step": planned.step_seconds,
        "schedule": planned.schedule.name,
        "microbatches": planned.microbatches,
        "virtual": planned.virtual,
        "bubble": planned.bubble,
        "peak": max(planned.peaks),
        "limit": limit,
        "seconds": time.process_time() - start,
    }


def fault(now: dict[str, Any], before: dict[str, Any]) -> str:
    """What is worse than before, in words; empty where nothing is."""
    if ("step" in now) != ("step" in before):
        return "" if "step" in now else "is refused"
    if "step" not in now:
        return ""
    ratio = now["step"] / before["step"]
    if ratio > 1 + 1e-6:
        return f"is slower by {ratio - 1:.3%}"
    is_larger = ratio > 1 - 1e-6 and now["peak"] > before["peak"] * (1 + 1e-6)
    return f"holds {now['peak'] / before['peak'] - 1:.3%} more" if is_larger else ""


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
    found: dict[str, dict[str, Any]] = {}
    faults: list[str] = []
    for case in CASES:
        if asked.only not in case.name:
            continue
        known = before.get(case.name)
        found[case.name] = answered = answer(case, known and known["limit"])
        said = fault(answered, known) if known else ""
        if known and "step" in answered and "step" in known:
            said = f"{answered['step'] / known['step']:.4f} of the step; {said}"
        faults += [said] if known and fault(answered, known) else []
        print(case.name, answered, said, flush=True)
        if asked.write:
            asked.write.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    common = found.keys() & before.keys()
    if common:
        common = {name for name in common if "step" in found[name] and "step" in before[name]}
        ratio = sum(found[name]["seconds"] for name in common) / sum(before[name]["seconds"] for name in common)
        print(f"{len(common)} pipelines, {len(faults)} worse; they take {ratio:.2f} of what they took")
        sys.exit(bool(faults))


if __name__ == "__main__":
    main()
