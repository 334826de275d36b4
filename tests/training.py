"""Training on a mesh, planned or at random, against training on one device, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch import nn
from torch.distributed._local_tensor import LocalTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.utils._python_dispatch import TorchDispatchMode

import autoshard
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import CaptureOptions, JointGraph, capture
from autoshard.cluster.cluster import Cluster, Link
from autoshard.planner import planning
from autoshard.runtime.shards import gather_full_tensor
from autoshard.specs.axes import MeshShape
from autoshard.tools.verify import differences
from autoshard.tools.verify.float64 import Float64Mode, default_float64
from autoshard.tools.verify.report import TOLERANCE as TOLERANCE
from tests import models
from tests.option_groups import grouped
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh

OF_ONE_LAYER = " of one layer"  # behind the name of a model that has two
ONE_LAYER = "gpt" + OF_ONE_LAYER
STEPS = 3  # of the rows of docs/numerics.md, and of pipelines
FEW = 2  # of tests: the second has the state that the first one leaves to the optimizer
LEARNING_RATE = 0.1
MOMENTUM = 0.9
PLANNING_SECONDS = 10.0  # enough for one and two axes; on three, the search ends there


Effort = Literal["fast", "full"]


@dataclass(frozen=True, slots=True)
class Trace:
    """What training left behind, as whole tensors: for every name, the tensors that the ranks hold.

    `losses` are those of all steps; outputs and gradients are those of the last, parameters and buffers after it.
    `collectives` counts, by kind, what one rank called in the last step; `placements` are those of the parameters;
    `replicated` names the operators that no sharding rule is for.
    """

    losses: dict[str, list[torch.Tensor]]
    outputs: dict[str, list[torch.Tensor]]
    gradients: dict[str, list[torch.Tensor]]
    parameters: dict[str, list[torch.Tensor]]
    buffers: dict[str, list[torch.Tensor]]
    collectives: dict[str, int]
    placements: dict[str, tuple[Placement, ...]]
    replicated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Errors:
    """The largest relative difference to one device, of each kind of tensor."""

    losses: float
    outputs: float
    gradients: float
    parameters: float
    buffers: float

    @property
    def worst(self) -> float:
        return max(dataclasses.astuple(self))


class Calls(TorchDispatchMode):
    """While active, counts the collectives that this rank calls, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace == "_c10d_functional" and func is not torch.ops._c10d_functional.wait_tensor.default:
            self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Rows(TorchDispatchMode):
    """While active, notes how many rows this rank activates."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            self.rows.add(args[0].shape[0])
        return func(*args, **(kwargs or {}))


def fast_links() -> Cluster:
    """CPUs with links so fast that the planner shards even the tiny models of the tests."""
    cluster = Cluster.preset("cpu")
    link = Link(bandwidth=1e12, latency=1e-9)
    device = dataclasses.replace(cluster.device, kernel_overhead=1e-9)
    return dataclasses.replace(cluster, inside=link, between=link, device=device)


def unlike_devices(devices: str = "1xV100 + 1xP100") -> Cluster:
    """Devices of which all that counts is what they compute."""
    data = json.loads(Cluster.parse(devices, between=Link(1e16, 1e-15)).to_json())
    for stretch in data["stretches"]:
        stretch["inside"] = {"bandwidth": 1e16, "latency": 1e-15}
        stretch["device"] |= {"kernel_overhead": 1e-15, "memory_bandwidth": 1e18}
        for measured in ("operators", "dispatch", "compiled_dispatch", "sources"):
            stretch["device"].pop(measured, None)
    return Cluster.from_json(json.dumps(data))


def outputs_of(result: Any) -> dict[str, torch.Tensor]:
    """The tensors that a model returned, by name; its loss, if it returned one, as `loss`."""
    if isinstance(result, torch.Tensor):
        return {"loss" if result.ndim == 0 else "output": result}
    if isinstance(result, Mapping):
        return {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    return {"loss" if value.ndim == 0 else f"output[{place}]": value for place, value in enumerate(result)}


def loss_of(outputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The model's own loss, or a mean square of its first output."""
    return outputs["loss"] if "loss" in outputs else next(iter(outputs.values())).square().mean()


def train(module: nn.Module, inputs: Mapping[str, Any], steps: int = FEW) -> Trace:
    """Train with SGD and momentum on the same batch.

    Adam would divide the rounding of gradients that are exactly zero, such as those of key biases, by itself.
    """
    optimizer = torch.optim.SGD(module.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    losses = {}
    outputs: dict[str, torch.Tensor] = {}
    calls = Calls()
    for step in range(steps):
        with calls if step == steps - 1 else contextlib.nullcontext():
            outputs = outputs_of(module(**inputs))
            loss = loss_of(outputs)
            optimizer.zero_grad()
            loss.backward()
        optimizer.step()
        losses[f"step {step}"] = loss.detach()
    gradients = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    placements = {name: tuple(p.placements) for name, p in parameters.items() if isinstance(p, DTensor)}
    return Trace(*map(_per_rank, (losses, outputs, gradients, parameters, buffers)), dict(calls.counts), placements)


def _per_rank(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    return {name: held_by_ranks(tensor.detach()) for name, tensor in tensors.items()}


def held_by_ranks(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The whole tensor as every rank in this process has it, in float64."""
    if isinstance(tensor, DTensor):
        placements = [Replicate() if placement.is_partial() else placement for placement in tensor.placements]
        tensor = gather_full_tensor(
            tensor.redistribute(placements=placements) if placements != [*tensor.placements] else tensor
        )
    values = list(tensor._local_tensors.values()) if isinstance(tensor, LocalTensor) else [tensor]
    return [value.double().clone() for value in values]


def build(name: str, **options: Any) -> models.Model:
    """A model of `tests.models` with options of its own, in float64 all through."""
    if name.endswith(OF_ONE_LAYER):
        name, options = name.removesuffix(OF_ONE_LAYER), options | {"layers": 1}
    with Float64Mode():
        return models.ZOO[name](dtype=torch.float64, **options)


@functools.cache
def one_device(name: str, steps: int = FEW) -> Trace:
    """The trace of a model on one device."""
    module, inputs = build(name)
    with Float64Mode():
        return train(module, inputs, steps)


def train_on_mesh(
    name: str, mesh: Mapping[str, int], steps: int = FEW, *, effort: Effort = "full", **options: Any
) -> Trace:
    """Train a model, built with these options, as planned on all ranks of a mesh in this process."""
    with simulated_mesh(**mesh) as device_mesh:
        return _train_planned(name, device_mesh, steps, effort, **options)


def train_on_processes(name: str, mesh: Mapping[str, int], steps: int = FEW, *, effort: Effort = "full") -> Trace:
    """Train a model as planned on a mesh of processes of which this is one."""
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    return _train_planned(name, device_mesh, steps, effort)


def _train_planned(name: str, device_mesh: DeviceMesh, steps: int, effort: Effort = "full", **options: Any) -> Trace:
    module, inputs = build(name, **options)
    asked: dict[str, Any] = {"cluster": fast_links(), "time_limit": PLANNING_SECONDS, "effort": effort}
    with Float64Mode(), warnings.catch_warnings(record=True) as raised:
        autoshard.parallelize(module, device_mesh, (), inputs, **grouped(asked))
    with default_float64():
        trace = train(module, inputs, steps)
    return dataclasses.replace(trace, replicated=_without_rule(raised))


def _without_rule(raised: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """The operators that planning warned of, for want of a rule; other warnings are raised again."""
    found = []
    for one in raised:
        named = re.match("no sharding rule for (.*?) ", str(one.message))
        if named:
            found.append(named[1])
        else:
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return tuple(found)


@functools.cache
def joint_graph(name: str) -> JointGraph:
    """The graph of a model's step."""
    module, inputs = build(name)
    with Float64Mode():
        return capture(module, (), inputs)


@contextlib.contextmanager
def captured_as(graph: JointGraph) -> Iterator[None]:
    """Have `parallelize` take the graph that a plan was drawn for, rather than capture an equal module once more."""
    fingerprint = graph.fingerprint

    def known(call: BoundCall, options: CaptureOptions) -> JointGraph:
        assert graph.aliases.keys() >= dict(call.module.named_parameters()).keys()
        return graph

    with mock.patch.object(planning, "capture_call", known):
        yield
    assert graph.fingerprint == fingerprint


def train_random_plan(
    name: str, mesh: Mapping[str, int], seed: int, steps: int = 1, *, planned_outputs: bool = False, **options: float
) -> Trace:
    """Train a model under a random plan on all ranks of a mesh in this process.

    Args:
        name: of the model.
        mesh: axis sizes.
        seed: of the plan.
        steps: of the optimizer.
        planned_outputs: leave outputs as they lie.
        options: further options of `random_plan`.
    """
    module, inputs = build(name)
    graph = joint_graph(name)
    plan = random_plan(graph, MeshShape.of(mesh), seed, planned_outputs=planned_outputs, **options)
    with simulated_mesh(**mesh) as device_mesh:
        with Float64Mode(), captured_as(graph):
            outputs = "planned" if planned_outputs else None
            autoshard.parallelize(module, device_mesh, (), inputs, plan=plan, output_placements=outputs)
        with default_float64():
            return train(module, inputs, steps)


class Beside(nn.Module):
    """Models beside one another, each called with the same inputs: the loss of each, and their sum.

    One capture and one plan serve them all; `worst_by_name` tells whose numbers are wrong.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for place, module in enumerate(modules):
            self.add_module(f"model{place}", module)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        losses = {name: module(*args, **kwargs) for name, module in self.named_children()}
        return {"loss": torch.stack([*losses.values()]).sum()} | losses


def worst_by_name(names: Sequence[str], trace: Trace, reference: Trace) -> dict[str, float]:
    """The largest difference to one device of every model of a `Beside`, by these names, where it is too large."""
    errors = {"all together": compare(trace, reference).worst}
    for place, name in enumerate(names):
        errors[name] = compare(*(_part(one, f"model{place}") for one in (trace, reference))).worst
    return {name: error for name, error in errors.items() if error > TOLERANCE}


def _part(trace: Trace, model: str) -> Trace:
    kinds = {
        kind: {name: held for name, held in getattr(trace, kind).items() if name.split(".")[0] == model}
        for kind in ("outputs", "gradients", "parameters", "buffers")
    }
    return dataclasses.replace(trace, losses={}, **kinds)


def compare(trace: Trace, reference: Trace) -> Errors:
    """How far all ranks are from one device.

    The difference of two tensors is measured relative to the largest element of the reference, but not to less than
    a thousandth of the largest element among all tensors of its kind: a gradient that is exactly zero in theory is
    rounding on both sides.
    """
    return Errors(
        *(
            relative_difference(getattr(trace, kind.name), getattr(reference, kind.name))
            for kind in dataclasses.fields(Errors)
        )
    )


def relative_difference(ours: Mapping[str, list[torch.Tensor]], theirs: Mapping[str, list[torch.Tensor]]) -> float:
    """The largest relative difference over names and ranks; infinite where tensors are missing or of other shapes."""
    if ours.keys() != theirs.keys():
        return float("inf")
    references = {name: values[0] for name, values in theirs.items()}
    scales = differences.difference_scales(references)
    pairs = {name: [(value, reference) for value in ours[name]] for name, reference in references.items()}
    return max((differences.relative_difference(pairs[name], scales[name]) for name in references), default=0.0)
