"""Rows of `docs/numerics.md` for pipelines: models on meshes with a pipeline axis, in real processes."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields

import torch

from autoshard.specs.axes import MeshShape
from tests.pipeline.pipelines import train_model_alone
from tests.pipeline.planned_cases import OURS, Case
from tests.training import relative_difference
from tests.workers import Workers

logger = logging.getLogger(__name__)

BATCH = 8
TWO, FOUR = {"pp": 2}, {"pp": 4}
DATA, TENSOR, ALL = {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}, {"pp": 2, "dp": 2, "tp": 2}
LAYER = {"layers": 1}
CASES = tuple(
    Case(model, mesh, schedule, microbatches, options={"batch": BATCH} | options)
    for model, options, runs in [
        ("hf_gpt2", LAYER, [(FOUR, "InterleavedZeroBubble", 4), (TENSOR, "ZBVZeroBubble", 4), (ALL, "GPipe", 2)]),
        ("hf_llama", LAYER, [(TWO, "DualPipeV", 4), (TENSOR, "LoopedBFS", 4), (ALL, OURS, 4)]),
        ("hf_t5", {}, [(FOUR, "GPipe", 4), (DATA, "ZBVZeroBubble", 4), (TENSOR, "1F1B", 2)]),
        ("unet", {}, [(TWO, OURS, 4), (FOUR, "LoopedBFS", 4), (DATA, "InterleavedZeroBubble", 2)]),
        ("hf_mixtral", {}, [(FOUR, "1F1B", 8), (DATA, "1F1B", 2), (ALL, "Interleaved1F1B", 4)]),
    ]
    for mesh, schedule, microbatches in runs
)

TEXT = """
## Pipelines

Meshes with a pipeline axis, in real processes over gloo: one for each rank, up to eight. Stages have equal numbers of
operators; the planner shards each stage on the rest of the mesh. The step runs in one of torch's schedules, or in an
order of our own (custom). The one device computes the whole batch at once. Gradients are clipped in every step to less
than their norm. **Norms** are the total norms of all steps as every rank gets them. Gradients are the clipped ones of
the last step. Every rank is compared in all that it holds.

"""


@dataclass(frozen=True, slots=True)
class Distances:
    """The largest relative difference to one device, of each kind of tensor."""

    losses: float
    norms: float
    gradients: float
    parameters: float


_PREFIXES = {"losses": "step ", "norms": "norm ", "gradients": "gradient "}


def pipeline_table(workers: Mapping[int, Workers], names: Mapping[str, str]) -> str:
    """The section as Markdown.

    Args:
        workers: processes, by their number.
        names: of models, as readers know them.
    """
    titles = ["Model", "Mesh", "Schedule", "Microbatches", "Stages", "Sharded"]
    titles += [field.name.capitalize() for field in fields(Distances)]
    lines = [
        titles,
        ["---"] * len(titles),
        *(_row(case, workers[MeshShape.of(case.mesh).size], names) for case in CASES),
    ]
    return TEXT + "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _row(case: Case, workers: Workers, names: Mapping[str, str]) -> list[str]:
    plan = case.plan()
    distances = compare(case.run(workers, plan), train_model_alone(case.model, 1, **(case.options or {})))
    placements = {name: row for stage in plan.stages for name, row in stage.placements.items()}
    sharded = sum(any(placement.is_shard() for placement in row) for row in placements.values())
    order = case.order
    sizes = [order.name, str(order.microbatches), str(order.stages), f"{sharded} of {len(placements)}"]
    figures = [f"{value:.1e}" if value else "0" for value in astuple(distances)]
    cells = [names[case.model], str(MeshShape.of(case.mesh)), *sizes, *figures]
    logger.info("%s", " | ".join(cells))
    return cells


def compare(held: list[dict[str, torch.Tensor]], expected: Mapping[str, torch.Tensor]) -> Distances:
    """How far what the ranks hold is from one device, measured as `tests.training.compare` does."""
    found: dict[str, list[torch.Tensor]] = {}
    for one in held:
        for name, value in one.items():
            found.setdefault(name, []).append(value.double())
    kinds: dict[str, set[str]] = {field.name: set() for field in fields(Distances)}
    for name in found.keys() | expected.keys():
        kinds[next((kind for kind, prefix in _PREFIXES.items() if name.startswith(prefix)), "parameters")].add(name)
    return Distances(
        **{
            kind: relative_difference(
                {name: found[name] for name in names if name in found},
                {name: [expected[name].double()] for name in names if name in expected},
            )
            for kind, names in kinds.items()
        }
    )
