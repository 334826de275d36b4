"""The subject of a plan, for people: the model, its call, precisions and devices, and the work of a step."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

import torch

from autoshard.capture.backward_copies import RECOMPUTES
from autoshard.capture.joint import JointGraph
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.cost import work_of_call
from autoshard.options.target import Target
from autoshard.patterns.graph_rules import GraphRules
from autoshard.specs.axes import MeshShape


def subject_of(graph: JointGraph, target: Target) -> dict[str, str]:
    """Return label and text of the lines that describe the subject of a plan, and its date."""
    parameters = [source.node.meta["val"] for source in graph.parameters]
    inputs = {source.name: source.node.meta["val"] for source in graph.inputs if source.kind == "input"}
    listed = ", ".join(
        f"{name} {'x'.join(map(str, like.shape)) or 'scalar'} {_name(like.dtype)}" for name, like in inputs.items()
    )
    sizes = ", ".join(f"{name} {size}" for name, size in _sizes(inputs.values()).items())
    count = sum(like.numel() for like in parameters)
    policy = target.options.mp_policy
    casts = {
        "parameters cast to": policy and policy.param_dtype,
        "gradients reduced in": policy and policy.reduce_dtype,
        "outputs cast to": policy and policy.output_dtype,
    }
    elements = f"{count:,} parameters in {_dtypes(parameters)}" if parameters else ""
    lines = {
        "model": ", ".join(filter(None, (graph.model, elements))),
        "inputs": f"{listed}{f' ({sizes})' if sizes else ''}",
        "precision": ", ".join(f"{text} {_name(dtype)}" for text, dtype in casts.items() if dtype),
        "optimizer": target.settings.optimizer.name,
        "device": target.cluster.device.name,
        "made on": datetime.date.today().isoformat(),
    }
    return {label: text for label, text in lines.items() if text}


def work_of(graph: JointGraph, rules: GraphRules, cluster: Cluster, mesh: MeshShape) -> dict[str, Any]:
    """Return the numbers from which throughput and device utilisation are computed.

    Returns:
        `"samples"` and `"tokens"` of a step, if known; `"peak_seconds"`: the seconds that the products, convolutions
        and attention of the step would take at the peak rates of the devices, without recomputation.
    """
    sizes = _sizes(source.node.meta["val"] for source in graph.inputs if source.kind == "input")
    work: dict[str, Any] = {}
    if "batch" in sizes:
        work["samples"] = sizes["batch"]
    if "sequence" in sizes:
        work["tokens"] = sizes["batch"] * sizes["sequence"]
    seconds = 0.0
    for node in rules.operators:
        if RECOMPUTES in node.meta:
            continue
        call = rules.calls[node]
        results = [meta for meta in call.results if meta is not None]
        kernel = work_of_call(call.op, call.operands, results, call.args)
        if kernel.flops:
            seconds += (kernel.flops - kernel.repeated) / cluster.device.peak(kernel.dtype)
    if seconds:
        work["peak_seconds"] = seconds / mesh.size
    return work


def _sizes(inputs: Iterable[torch.Tensor]) -> dict[str, int]:
    """Return the batch size, dim 0 of the first input with dims, and the sequence length, dim 1 if it has indices."""
    first = next((like for like in inputs if like.ndim), None)
    if first is None:
        return {}
    is_sequence = first.ndim == 2 and not first.dtype.is_floating_point
    return {"batch": int(first.shape[0]), **({"sequence": int(first.shape[1])} if is_sequence else {})}


def _dtypes(tensors: Iterable[torch.Tensor]) -> str:
    return " and ".join(dict.fromkeys(_name(tensor.dtype) for tensor in tensors))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
