"""The tables of `docs/numerics.md`, from real runs: `python -m tests.numerics --write`, or without, to print them."""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
import torch.distributed as dist

from tests.pipeline_rows import pipeline_table
from tests.precision import BFLOAT16_ROUNDING, FACTOR, distances
from tests.tight_limits import TightRun, tight_row
from tests.training import (
    STEPS,
    Effort,
    Errors,
    Trace,
    compare,
    one_device,
    train_on_mesh,
    train_on_processes,
    train_random_plan,
)
from tests.workers import Workers

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[1] / "docs" / "numerics.md"
CORE = {
    "mlp": "MLP",
    "hf_gpt2": "GPT-2",
    "hf_llama": "Llama",
    "hf_bert": "BERT",
    "hf_vit": "ViT",
    "resnet18": "ResNet-18",
}
OTHERS = {
    "hf_t5": "T5",
    "hf_qwen3": "Qwen3",
    "hf_gemma": "Gemma",
    "hf_opt": "OPT",
    "hf_mixtral": "Mixtral",
    "hf_qwen3_moe": "Qwen3-MoE",
    "hf_deepseek_v3": "DeepSeek-V3",
    "hf_roberta": "RoBERTa",
    "hf_albert": "ALBERT",
    "hf_deberta": "DeBERTa-v2",
    "hf_clip": "CLIP",
    "hf_whisper": "Whisper",
    "hf_swin": "Swin",
    "hf_convnext": "ConvNeXt",
    "vgg": "VGG",
    "wide_resnet": "Wide-ResNet",
    "unet": "U-Net",
    "lstm": "LSTM",
    "gnmt": "GNMT",
    "dlrm": "DLRM",
    "gshard": "GShard",
}
MODELS = CORE | OTHERS
MESHES = ((1,), (2,), (4,), (3,), (2, 2), (2, 2, 2))
SQUARE = (2, 2)
PLANNED = tuple((model, mesh) for model in MODELS for mesh in (MESHES if model in CORE else MESHES[1:]))
RANDOMLY = tuple((model, mesh) for model in CORE for mesh in MESHES[1:])
REAL = ("hf_gpt2", "hf_llama")
LOWERED = tuple(model for model in CORE if model != "resnet18")
TIGHT = tuple((model, SQUARE, recompute) for model in CORE for recompute in ("none", "auto"))
KINDS = {
    "all_reduce": "AR",
    "all_gather_into_tensor": "AG",
    "all_gather_into_tensor_coalesced": "joined AG",
    "reduce_scatter_tensor": "RS",
    "all_to_all_single": "A2A",
}

INTRODUCTION = f"""# Numerics

Written by `python -m tests.numerics --write` from real runs with torch {torch.__version__.split("+")[0]}.

A model trained on a mesh computes the same numbers as on one device. Every row below trained a small model for {STEPS}
steps of SGD with momentum (one step under a random plan), on the same batch, in float64, once on one device and once on
the mesh. It compares *every rank* with the one device: the losses of all steps, the outputs and gradients of the last
step, and parameters and buffers after it. All must agree to 1e-9. The rest is rounding of sums in another order.

* **Relative difference** of two tensors: the largest absolute difference over the largest absolute element of the
  one-device tensor. The divisor is at least a thousandth of the largest element among all tensors of that column,
  because some gradients, such as those of key biases, are exactly zero in theory and rounding in practice, on one
  device too. The optimizer is SGD for the same reason: Adam divides such a gradient by its own size, and turns rounding
  into a step.
* **float64 everywhere.** Hugging Face models compute some things in float32 whatever their dtype is. Here these are
  widened, so that only the sharding can differ. Dropout is off.
* **Sharded** counts the parameters that are split over some mesh axis, of all parameters.
* **Collectives** counts the calls of one rank in one step: all-reduce (AR), all-gather (AG), reduce-scatter (RS),
  all-to-all (A2A). Gradients that are reduced together count once. If no parameter is sharded, the planner found it
  cheapest to split the batch and the activations only; the collectives show that.
* **Replicated** counts the operators that have no sharding rule. Every rank runs them on whole tensors.
* On real links, the planner would replicate models as small as these. It is given a cluster whose links are so fast
  that sharding pays.
* Llama has 4 query heads over 2 key and value heads. The mixtures of experts of Hugging Face have 4 experts, 2 for each
  token, with `experts_implementation="batched_mm"`. The default, `"grouped_mm"`, has no kernel in float64 (the tests
  train it on a mesh against this one). `"eager"` is a Python loop over the chosen experts, which no graph can hold.
* The tests train the kinds of these models on one mesh or more each, most of them with one layer.
* Unless stated otherwise, ranks are simulated in one process: the same program, executed for all ranks.
"""

RANDOM = """
## Random plans

The planner never chooses most of the strategies that the library has. Here the strategy of every operator, the
placement of every parameter and every shared copy are drawn at random among all that fit together. A third of the
parameters must be sharded, and are gathered again in each phase. One step.
"""

LIMITED = """
## Under tight limits

The limit is the smallest `memory_limit` that a `BudgetError` names, here as a share of the peak without limit. Such
plans mix all choices: parameters that are *whole*; sharded and *used* so; gathered *once*, with the copy kept for the
backward half (ZeRO-1 and ZeRO-2); gathered *again* in each half (ZeRO-3); and, with `recompute="auto"`, *layers* that
run again. One step.

| Model | Mesh | `recompute` | Limit | Whole | Used | Once | Again | Layers | Worst difference |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""

PRECISION = f"""
## Mixed precision

`mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)`, one step from float32
parameters. The reference is the same step in float64. One device in bfloat16 has some distance to it. A mesh in
bfloat16, which rounds other partial sums, may have at most {FACTOR:g} times that distance, or
{BFLOAT16_ROUNDING:.1e}, one rounding, if that is more. (ResNet-18 is not included: batch norm of bfloat16 with
statistics in float32 has no kernel on CPUs.)

| Model | Mesh | Loss: mesh | one device | Gradients: mesh | one device |
| --- | --- | --- | --- | --- | --- |
"""

PROCESSES = """
## Real processes

Four processes over gloo, each with its own interpreter, mesh (2, 2).
"""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table: how a model lay on a mesh, and how far it was from one device."""

    model: str
    mesh: tuple[int, ...]
    sharded: int
    parameters: int
    collectives: Mapping[str, int]
    replicated: int
    errors: Errors


def axes(sizes: tuple[int, ...]) -> dict[str, int]:
    """The mesh of a row, with named axes."""
    return {f"axis{place}": size for place, size in enumerate(sizes)}


def planned_row(model: str, mesh: tuple[int, ...], steps: int = STEPS, effort: Effort = "full") -> Row:
    """A run under the planner's plan."""
    return _row(model, mesh, train_on_mesh(model, axes(mesh), steps, effort=effort))


def random_row(model: str, mesh: tuple[int, ...], seed: int) -> Row:
    """A run under a random plan."""
    return _row(model, mesh, train_random_plan(model, axes(mesh), seed, forced=1 / 3))


def process_row(model: str, workers: Workers) -> Row:
    """A run in real processes; the worst of all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        workers.run(_write_own_row, model, folder)
        rows = [json.loads(path.read_text()) for path in sorted(Path(folder).iterdir())]
    assert len(rows) == workers.size
    worst = {field.name: max(row["errors"][field.name] for row in rows) for field in fields(Errors)}
    return Row(**rows[0] | {"mesh": tuple(rows[0]["mesh"]), "errors": Errors(**worst)})


def _write_own_row(model: str, folder: str) -> None:
    row = _row(model, SQUARE, train_on_processes(model, axes(SQUARE), STEPS))
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(asdict(row)))


def _row(model: str, mesh: tuple[int, ...], trace: Trace) -> Row:
    sharded = sum(any(placement.is_shard() for placement in placements) for placements in trace.placements.values())
    errors = compare(trace, one_device(model, len(trace.losses)))
    return Row(model, mesh, sharded, len(trace.placements), trace.collectives, len(trace.replicated), errors)


def lowered_row(model: str) -> str:
    """A line of the table of mixed precision."""
    ours, alone = distances(model, axes(SQUARE))
    figures = (ours.loss, alone.loss, ours.gradients, alone.gradients)
    return f"| {MODELS[model]} | {SQUARE} | {' | '.join(f'{figure:.1e}' for figure in figures)} |\n"


def limited_row(run: TightRun) -> str:
    """A line of the table of tight limits."""
    lying = " | ".join(str(run.lying[how]) for how in ("whole", "never", "once", "again"))
    share = f"{run.limit / run.unlimited:.0%}"
    return (
        f"| {MODELS[run.model]} | {run.mesh} | {run.recompute} | {share} | {lying} | {run.recomputed} "
        f"| {run.errors.worst:.1e} |\n"
    )


def planned_section(jobs: Executor) -> str:
    return f"\n## Planned\n\n{_table(_log_rows(jobs.map(planned_row, *zip(*PLANNED, strict=True))))}"


def random_section(jobs: Executor) -> str:
    rows = _log_rows(jobs.map(random_row, *zip(*RANDOMLY, strict=True), range(len(RANDOMLY))))
    return f"{RANDOM}\n{_table(rows)}"


def process_section(jobs: Executor) -> str:
    with Workers(4) as workers:
        return f"{PROCESSES}\n{_table(_log_rows(process_row(model, workers) for model in REAL))}"


def pipeline_section(jobs: Executor) -> str:
    with Workers(2) as two, Workers(4) as four, Workers(8) as eight:
        return pipeline_table({2: two, 4: four, 8: eight}, MODELS)


def limited_section(jobs: Executor) -> str:
    return LIMITED + "".join(map(limited_row, jobs.map(tight_row, *zip(*TIGHT, strict=True))))


def lowered_section(jobs: Executor) -> str:
    return PRECISION + "".join(jobs.map(lowered_row, LOWERED))


SECTIONS: dict[str, Callable[[Executor], str]] = {
    "Planned": planned_section,
    "Random plans": random_section,
    "Real processes": process_section,
    "Pipelines": pipeline_section,
    "Under tight limits": limited_section,
    "Mixed precision": lowered_section,
}
"""What makes each section of the page, by their titles, in their order."""


def page(made: Mapping[str, str], before: str) -> str:
    """The page as Markdown.

    Args:
        made: sections by their titles.
        before: the page as it was, which has the sections that were not made.
    """
    heading = "\n## "
    known = {text.partition("\n")[0]: heading + text.strip("\n") + "\n" for text in before.split(heading)[1:]}
    return INTRODUCTION + "".join((known | dict(made))[title] for title in SECTIONS)


def _table(rows: Iterable[Row]) -> str:
    titles = [
        "Model",
        "Mesh",
        "Sharded",
        "Collectives",
        "Replicated",
        *(field.name.capitalize() for field in fields(Errors)),
    ]
    lines = [titles, ["---"] * len(titles), *map(_cells, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Row) -> Iterator[str]:
    yield MODELS[row.model]
    yield str(row.mesh)
    yield f"{row.sharded} of {row.parameters}"
    calls = ", ".join(f"{count} {KINDS.get(kind, kind)}" for kind, count in sorted(row.collectives.items()))
    yield calls or ("none: one device" if row.mesh == (1,) else "none")
    yield str(row.replicated)
    for field in fields(Errors):
        value = getattr(row.errors, field.name)
        yield f"{value:.1e}" if value else "0"


def _log_rows(rows: Iterable[Row]) -> list[Row]:
    done = []
    for row in rows:
        logger.info("%s", " | ".join(_cells(row)))
        done.append(row)
    return done


def main() -> None:
    """Run everything and print the page, or write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that make rows; each takes one thread")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, help="run these alone; the rest of the page stays")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(asked.jobs, context, initializer=torch.set_num_threads, initargs=(1,)) as jobs:
        made = {name: SECTIONS[name](jobs) for name in asked.only or SECTIONS}
    text = page(made, PAGE.read_text("utf-8"))
    if asked.write:
        PAGE.write_text(text, "utf-8")
    else:
        print(text)  # noqa: T201 - what the command is for


if __name__ == "__main__":
    main()
