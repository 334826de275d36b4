"""The checks: one graph on all ranks, numbers of every kind of layer, pipelines, checkpoints, compiled programs.

Numbers are those of a training step on the mesh and on one device, each by its distance from float64 on the CPU.
"""

from __future__ import annotations

import copy
import dataclasses
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.nn import functional

import autoshard
from autoshard.tools.selfcheck import models
from autoshard.tools.selfcheck.models import Inputs, Model, make_seeded
from autoshard.tools.selfcheck.outcome import CheckOutcome, Processes

# By dtype, a relative distance from float64 that is always rounding: about a hundred ulps, and two.
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-6}
# Times that a mesh may be farther from float64 than one device: it adds in another order.
FACTOR = 2.0
# A tensor with smaller values, relative to the largest of its kind, is compared relative to the latter.
_SMALL = 1e-3
ADVICE = "Repeat it alone by --only; if one process gives the same, report the line with versions of torch and driver."

Tensors = dict[str, Tensor]


def fast_links() -> autoshard.Cluster:
    """Return a cluster with links so fast that even the small models of this check are sharded."""
    cluster = autoshard.Cluster.preset("cpu")
    inside, between = (
        dataclasses.replace(link, bandwidth=1e12, latency=1e-9) for link in (cluster.inside, cluster.between)
    )
    # With the real overhead of a kernel, small models are planned whole on every device, and nothing is checked.
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=inside, between=between, device=device)


def copy_model_to(model: Model, device: torch.device, dtype: torch.dtype) -> Model:
    """Return a copy of a model and its inputs on a device; floating-point inputs are converted to the dtype."""
    module, inputs = model
    copied = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in inputs.items()}
    return copy.deepcopy(module).to(device, dtype), copied


def step(module: nn.Module, inputs: Inputs) -> dict[str, Tensors]:
    """Train a step without an optimizer; return loss, gradients and buffers as full tensors in float64 on the CPU."""
    loss = module(**inputs)
    loss.backward()
    return {
        "loss": {"loss": exact(loss)},
        "gradients": gradients(module),
        "buffers": {name: exact(buffer) for name, buffer in module.named_buffers() if buffer.is_floating_point()},
    }


def gradients(module: nn.Module) -> Tensors:
    """Return the gradients of a module's parameters as full tensors."""
    return {name: exact(weight.grad) for name, weight in module.named_parameters() if weight.grad is not None}


def exact(tensor: Tensor) -> Tensor:
    """Return the full tensor in float64 on the CPU."""
    tensor = tensor.detach()
    return (autoshard.full_tensor(tensor) if isinstance(tensor, DTensor) else tensor).to("cpu", torch.float64)


def distance(results: Mapping[str, Tensors], reference: Mapping[str, Tensors]) -> float:
    """Return the largest relative difference of two steps; infinite where a tensor is missing or has a NaN.

    Only the kinds of tensors in `results` are compared.
    """
    return max(
        (_distance(tensors, reference[kind]) for kind, tensors in results.items() if reference[kind]), default=0.0
    )


def _distance(results: Tensors, reference: Tensors) -> float:
    if results.keys() != reference.keys():
        # A missing gradient is as wrong as a wrong one.
        return float("inf")
    largest = max(float(tensor.abs().max()) for tensor in reference.values())
    worst = 0.0
    for name, expected in reference.items():
        scale = max(float(expected.abs().max()), _SMALL * largest) or 1.0
        difference = float((results[name] - expected).abs().max()) / scale
        # `max` may drop a NaN.
        worst = max(worst, difference) if difference == difference else float("inf")
    return worst


def compare(
    make: Callable[[int], Model],
    run: Callable[[Model], dict[str, Tensors]],
    processes: Processes,
    dtypes: Mapping[torch.dtype, float] = ROUNDING,
) -> CheckOutcome:
    """Compare the step of `run` with that of one device, in every dtype.

    The mesh may be `FACTOR` times as far from float64 as one device, plus `ROUNDING`.

    Args:
        make: returns the model for a number of ranks.
        run: takes the model on this rank's device, and returns the result of `step`, or some kinds of its tensors.
        processes: of the job.
        dtypes: dtypes to compute in, and the distance that is rounding in each.
    """
    model = make_seeded(make, processes.size)
    reference = step(*copy_model_to(model, torch.device("cpu"), torch.float64))
    values: dict[str, float] = {}
    ratio, figures = 0.0, []
    for dtype, rounding in dtypes.items():
        results = run(copy_model_to(model, processes.device, dtype))
        alone = step(*copy_model_to(model, processes.device, dtype))
        error, least = distance(results, reference), distance({kind: alone[kind] for kind in results}, reference)
        name = str(dtype).removeprefix("torch.")
        values |= {name: error, f"{name}, one device": least}
        # Against one device in the same dtype, so that a kernel of low precision is no fault of the mesh.
        ratio = max(ratio, error / (FACTOR * least + rounding))
        figures.append(f"{name} {error:.1e} (one device {least:.1e})")
    # A NaN is wrong, too.
    wrong = not ratio <= 1.0
    return CheckOutcome("wrong" if wrong else "ok", ", ".join(figures), ADVICE if wrong else "", values, ratio)


def on_mesh(mesh: DeviceMesh, **options: Any) -> Callable[[Model], dict[str, Tensors]]:
    """Return a function that parallelizes a model on a mesh and trains a step."""

    def run(model: Model) -> dict[str, Tensors]:
        module, inputs = model
        options.setdefault("cluster", fast_links())
        autoshard.parallelize(module, mesh, (), inputs, search=autoshard.Search(effort="fast"), **options)
        return step(module, inputs)

    return run


# Probability of dropout.
SHARE = 0.3
# Enough draws for the share to be within a hundredth.
_ROWS, _COLUMNS = 64, 256


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """A check and its name in the table."""

    name: str
    run: Callable[[Processes], CheckOutcome]


def one_graph(processes: Processes) -> CheckOutcome:
    """Check that all ranks capture one graph."""
    module, inputs = copy_model_to(make_seeded(_small_gpt, processes.size), processes.device, torch.float32)
    plan = _fast_plan(module, inputs, processes)
    fingerprints: list[str] = [""] * processes.size
    dist.all_gather_object(fingerprints, plan.fingerprint)
    different = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if not different:
        return CheckOutcome("ok", f"fingerprint {fingerprints[0][:12]} on {processes.size} ranks")
    advice = "Compare versions of torch and autoshard, and environment variables, between these ranks and rank 0."
    return CheckOutcome("wrong", f"ranks {different} captured another graph than rank 0", advice)


def plan_from_meta(processes: Processes) -> CheckOutcome:
    """Check that a plan made on the meta device gives one device's numbers."""
    meta, inputs = copy_model_to(make_seeded(_small_gpt, processes.size), torch.device("meta"), torch.float32)
    text: list[str] = [_fast_plan(meta, inputs, processes).to_json()]
    # Plans of a search under a time limit may differ from rank to rank.
    dist.broadcast_object_list(text, src=0)
    plan = autoshard.ShardingPlan.from_json(text[0])
    run = on_mesh(processes.mesh(), plan=plan)
    return compare(_small_gpt, run, processes, {torch.float32: ROUNDING[torch.float32]})


def _small_gpt(ranks: int) -> Model:
    return models.gpt(ranks, layers=1)


def _fast_plan(module: nn.Module, inputs: models.Inputs, processes: Processes) -> autoshard.ShardingPlan:
    plan = autoshard.plan(
        module, {"x": processes.size}, (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast")
    )
    assert isinstance(plan, autoshard.ShardingPlan)
    return plan


# Gradients of batch norm are small differences of large sums: one device's are up to 0.17 from float64 in bfloat16.
BATCH_NORM_ROUNDING = ROUNDING | {torch.bfloat16: 0.25}


def numbers(
    make: Callable[[int], Model], rounding: Mapping[torch.dtype, float] = ROUNDING
) -> Callable[[Processes], CheckOutcome]:
    """Return the check that a model's step on the mesh has one device's numbers, but for rounding in each dtype."""
    return lambda processes: compare(make, on_mesh(processes.mesh()), processes, rounding)


class Dropout(nn.Module):
    """Dropout of a tensor that has a given placement."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.placement = placement
        self.weight = nn.Parameter(torch.ones(_COLUMNS))

    def forward(self, x: Tensor) -> Tensor:
        dropped = functional.dropout(autoshard.shard(x * self.weight, self.placement), SHARE)
        return autoshard.shard(dropped, self.placement)


def dropout(processes: Processes) -> CheckOutcome:
    """Check that replicas draw equal numbers, shards others, gradients see the same mask, and the share is right."""
    mesh, faults, shares = processes.mesh(), [], []
    for placement in (Replicate(), Shard(0)):
        module = Dropout(placement).to(processes.device)
        x = torch.ones(_ROWS * processes.size, _COLUMNS, device=processes.device)
        # At the prices of a CPU no rank gathers what it can draw, so that replicas draw all of it.
        autoshard.parallelize(module, mesh, (x,), cluster="cpu", search=autoshard.Search(effort="fast"))
        # The seeds of a job need not be equal.
        torch.manual_seed(processes.rank)
        drawn, again = module(x), module(x)
        drawn.sum().backward()
        gathered: list[Tensor] = [drawn] * processes.size
        dist.all_gather_object(gathered, drawn.detach().cpu())
        if not all(torch.equal(local, drawn.cpu()) for local in gathered):
            faults.append("replicas drew different numbers")
        if torch.equal(drawn, again):
            faults.append("two calls drew the same numbers")
        parts = drawn.chunk(processes.size)
        if placement == Shard(0) and any(torch.equal(part, parts[0]) for part in parts[1:]):
            faults.append("shards drew the same numbers")
        scaled = torch.full_like(drawn, 1 / (1 - SHARE))
        if not torch.allclose(drawn, torch.where(drawn == 0, 0, scaled)):
            faults.append("what is kept was not scaled by 1 / (1 - p)")
        if not torch.allclose(gradients(module)["weight"], exact(drawn.sum(0)), rtol=1e-4):
            faults.append("the gradient saw another mask")
        shares.append(float((drawn == 0).double().mean()))
    # Of a mean of so many draws; at five deviations, a right program fails about once in a million runs.
    deviation = (SHARE * (1 - SHARE) / (_ROWS * processes.size * _COLUMNS)) ** 0.5
    ratio = max(abs(share - SHARE) for share in shares) / (5 * deviation)
    if ratio > 1:
        faults.append("the share is off by more than five standard deviations")
    figure = f"dropped {', '.join(f'{share:.3f}' for share in shares)} of {SHARE}"
    values = dict(zip(("replicated", "sharded"), shares, strict=True))
    if faults:
        return CheckOutcome("wrong", f"{'; '.join(dict.fromkeys(faults))}; {figure}", ADVICE, values, ratio)
    return CheckOutcome("ok", figure, "", values, ratio)


def pipeline(processes: Processes) -> CheckOutcome:
    """Check two stages, each on half of the ranks, with two microbatches."""
    if processes.size % 2:
        return CheckOutcome("skipped", f"two stages need an even number of processes, not {processes.size}")
    half = processes.size // 2
    mesh = processes.mesh((2, half), ("pp", "x")) if half > 1 else processes.mesh((2,), ("pp",))

    def run(model: Model) -> dict[str, Tensors]:
        module, inputs = model
        options: dict[str, Any] = {"cluster": fast_links(), "effort": "fast", "microbatches": 2, "schedule": "1F1B"}
        staged = autoshard.parallelize(module, mesh, (), inputs, **options)
        assert isinstance(staged, autoshard.PipelineModule)
        loss = staged.train_step(**inputs)
        # Each rank has the gradients of its own stage only.
        by_rank: list[Tensors] = [{}] * processes.size
        dist.all_gather_object(by_rank, gradients(staged))
        merged = {name: gradient for tensors in by_rank for name, gradient in tensors.items()}
        return {"loss": {"loss": exact(loss)}, "gradients": merged}

    return compare(models.gpt, run, processes)


def checkpoint(processes: Processes) -> CheckOutcome:
    """Check that a model and its optimizer are bitwise the same when they are saved and loaded into others."""
    if not processes.on_one_host:
        return CheckOutcome(
            "skipped", "the hosts of the job may have no folder in common", "Try your own folder by hand."
        )
    folder = [tempfile.mkdtemp(prefix="autoshard-") if processes.rank == 0 else ""]
    # All ranks save to one folder, whose random name only rank 0 knows.
    dist.broadcast_object_list(folder, src=0)
    try:
        saved = _train_once(0, processes)
        state_dict_saver.save(_state(*saved), checkpoint_id=folder[0])
        # Another seed, so that values that were not loaded differ.
        loaded = _train_once(1, processes)
        state = _state(*loaded)
        state_dict_loader.load(state, checkpoint_id=folder[0])
        set_state_dict(*loaded, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        dist.barrier()
    finally:
        if processes.rank == 0:
            shutil.rmtree(folder[0], ignore_errors=True)
    copies, originals = _tensors(*loaded), _tensors(*saved)
    unequal = [name for name, tensor in originals.items() if not torch.equal(copies[name], tensor)]
    if unequal:
        advice = "Save and load by hand to the folder that your checkpoints will lie in, and compare."
        return CheckOutcome("wrong", f"{len(unequal)} of {len(originals)} tensors differ: {unequal[0]}", advice)
    return CheckOutcome("ok", f"{len(originals)} tensors of model and optimizer equal")


TrainedModel = tuple[nn.Module, torch.optim.Optimizer]


def _train_once(seed: int, processes: Processes) -> TrainedModel:
    module, inputs = copy_model_to(make_seeded(models.odd_heads, processes.size, seed), processes.device, torch.float32)
    autoshard.parallelize(
        module, processes.mesh(), (), inputs, cluster=fast_links(), search=autoshard.Search(effort="fast")
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    module(**inputs).backward()
    optimizer.step()
    return module, optimizer


def _state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    model, state = get_state_dict(module, optimizer)
    return {"model": model, "optimizer": state}


def _tensors(module: nn.Module, optimizer: torch.optim.Optimizer) -> Tensors:
    """Return this rank's parameters and the state of their optimizer."""
    tensors = {}
    for name, parameter in module.named_parameters():
        state = {key: value for key, value in optimizer.state[parameter].items() if isinstance(value, Tensor)}
        for key, tensor in {"value": parameter.detach(), **state}.items():
            tensors[f"{name} ({key})"] = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return copy.deepcopy(tensors)


def compiled_program(processes: Processes) -> CheckOutcome:
    """Check that the local program compiled by inductor has one device's numbers."""
    try:
        # A machine without a compiler is no fault of the library: a trivial program tells the two apart.
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=processes.device))
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        advice = "Install a C++ compiler (CPU) or Triton (GPU) to use compile=True; nothing else needs it."
        return CheckOutcome("skipped", f"torch.compile itself fails here: {reason}", advice)
    run = on_mesh(processes.mesh(), compile=True)
    return compare(models.norms, run, processes, {torch.float32: ROUNDING[torch.float32]})


CHECKS = (
    SelfCheck("one graph on all ranks", one_graph),
    SelfCheck("plan made on meta", plan_from_meta),
    SelfCheck("attention, causal", numbers(models.causal_attention)),
    SelfCheck("attention, grouped", numbers(models.grouped_attention)),
    SelfCheck("attention, masked", numbers(models.masked_attention)),
    SelfCheck("attention, odd heads", numbers(models.odd_heads)),
    SelfCheck("norms", numbers(models.norms)),
    SelfCheck("convolutions, batch norm", numbers(models.convolutions, BATCH_NORM_ROUNDING)),
    SelfCheck("LSTM", numbers(models.recurrent)),
    SelfCheck("mixture of experts", numbers(models.experts)),
    SelfCheck("dropout of replicas", dropout),
    SelfCheck("pipeline", pipeline),
    SelfCheck("checkpoint", checkpoint),
    SelfCheck("compiled", compiled_program),
)
