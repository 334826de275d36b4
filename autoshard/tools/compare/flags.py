"""A standard layout as flags of torchtitan and Megatron-LM, and as code with torch's FSDP2 and tensor parallelism."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from autoshard import MeshShape
from autoshard.planner.layouts.standard_layouts import StandardLayout
from autoshard.planner.layouts.tensor_parallel import glob_names


@dataclass(frozen=True, slots=True)
class Job:
    """A layout and what its flags depend on.

    Attributes:
        layout: the layout.
        mesh: the mesh axes.
        samples: of the batch.
        recomputed: what runs again in the backward half: nothing, the cheap operators of layers, or layers.
        modules: path of every module -> the module's class.
        layers: paths of the repeated layers, in order.
    """

    layout: StandardLayout
    mesh: MeshShape
    samples: int
    recomputed: Literal["none", "selective", "full"]
    modules: Mapping[str, type[nn.Module]]
    layers: tuple[str, ...]

    def size(self, axes: Iterable[str]) -> int:
        """Return the number of devices over some axes."""
        return math.prod(self.mesh.sizes[self.mesh.index(axis)] for axis in axes)

    @property
    def tensor(self) -> int:
        """The degree of tensor parallelism."""
        axis = self.layout.model_axis
        return self.size([axis]) if axis is not None and self.layout.model_parallel != "EP" else 1

    @property
    def expert(self) -> int:
        """The degree of expert parallelism."""
        axis = self.layout.model_axis
        return self.size([axis]) if axis is not None and self.layout.model_parallel == "EP" else 1


def torchtitan_flags(job: Job) -> str:
    """Return the flags of torchtitan's trainer."""
    layout = job.layout
    degrees: dict[str, object] = {
        "data_parallel_replicate_degree": job.size(layout.replicated),
        "data_parallel_shard_degree": job.size(layout.sharded),
        "tensor_parallel_degree": job.tensor,
    }
    if layout.sharded:
        degrees["fsdp_reshard_after_forward"] = "always" if layout.regathers else "never"
    if job.expert > 1:
        degrees["expert_parallel_degree"] = job.expert
    flags = [f"--parallelism.{name} {value}" for name, value in degrees.items()]
    # It is on by default.
    if layout.model_parallel == "TP":
        flags.append("--parallelism.no_enable_sequence_parallel")
    flags.append(f"activation_checkpoint:{job.recomputed}")
    notes = []
    if job.expert > 1 and not layout.sharded:
        notes.append("# Experts lie on ranks that shard the other parameters: use FSDP2 x EP.")
    return _command(notes, flags)


def megatron_flags(job: Job) -> str:
    """Return the flags of Megatron-LM's training scripts."""
    layout = job.layout
    data = job.size((*layout.replicated, *layout.sharded))
    flags, notes = [f"--tensor-model-parallel-size {job.tensor}", "--pipeline-model-parallel-size 1"], []
    if layout.model_parallel == "TP+SP":
        flags.append("--sequence-parallel")
    if job.expert > 1:
        flags.append(f"--expert-model-parallel-size {job.expert}")
    flags += [f"--micro-batch-size {job.samples // data}", f"--global-batch-size {job.samples}"]
    flags.append("--overlap-grad-reduce")
    if layout.sharded:
        if not layout.regathers:
            notes.append("# Shards are not gathered once for both halves: optim_grads holds parameters whole instead.")
        strategy = "optim_grads_params" if layout.regathers else "optim_grads"
        flags += ["--use-megatron-fsdp", f"--data-parallel-sharding-strategy {strategy}", "--overlap-param-gather"]
        flags += ["--ckpt-format fsdp_dtensor", "--no-gradient-accumulation-fusion"]
        if layout.replicated:
            instances = f"--num-distributed-optimizer-instances {job.size(layout.replicated)}"
            flags += [instances, "--outer-dp-sharding-strategy no_shard"]
    if job.recomputed == "selective":
        flags.append("--recompute-granularity selective")
    if job.recomputed == "full":
        flags.append("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1")
    return _command(notes, flags)


def _command(notes: Sequence[str], flags: Sequence[str]) -> str:
    """Return comments, and flags one a line that a shell takes as one."""
    return "\n".join([*notes, " \\\n".join(flags)])


def fsdp2_code(job: Job) -> str:
    """Return Python code with torch's `fully_shard` and `parallelize_module`, for a model called `model`."""
    layout = job.layout
    # `fully_shard` replicates over the first axis of a mesh of two, and shards over the second.
    names = {"replicate": layout.replicated, "shard": layout.sharded}
    data = {name: job.size(axes) for name, axes in names.items() if axes}
    sizes = data | ({str(layout.model_axis): job.tensor} if job.tensor > 1 else {})
    lines = ["from torch.distributed.device_mesh import init_device_mesh"]
    if layout.sharded:
        lines.append("from torch.distributed.fsdp import fully_shard")
    shape = f"({', '.join(map(str, sizes.values()))},)"
    body = [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names=({_names_text(sizes)},))']
    if job.tensor > 1:
        styles = dict(_styles(job))
        used = sorted({style.partition("(")[0] for style in styles.values()})
        lines.append("from torch.distributed.tensor import Replicate, Shard")
        lines.append(f"from torch.distributed.tensor.parallel import {', '.join([*used, 'parallelize_module'])}")
        body += [f'parallelize_module(model, mesh["{layout.model_axis}"], {{']
        body += [f'    "{glob}": {style},' for glob, style in styles.items()]
        body += ["})", *_strided_notes(job)]
    if job.expert > 1:
        body.append("# Experts: torch has no style for them; see torchtitan's ExpertParallel.")
    if job.recomputed != "none":
        lines.append(
            "from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing"
        )
        classes = sorted({job.modules[layer].__name__ for layer in job.layers if layer in job.modules})
        check = f"type(part).__name__ in [{_names_text(classes)}]"
        if job.recomputed == "selective":
            body.append("# All of a layer runs again: products are kept by torch.utils.checkpoint's context_fn.")
        body.append(f"apply_activation_checkpointing(model, check_fn=lambda part: {check})")
    body += _data_parallel(job, tuple(data))
    if not layout.sharded and layout.replicated:
        lines.append("from torch.nn.parallel import DistributedDataParallel")
    return "\n".join([*lines, "", *body])


def _names_text(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _data_parallel(job: Job, axes: Sequence[str]) -> Iterator[str]:
    """Yield the lines that make a model data parallel over some axes of the mesh."""
    if not axes:
        return
    part = f"mesh[{_names_text(axes)}]"
    if not job.layout.sharded:
        yield f"model = DistributedDataParallel(model, device_mesh={part})"
        return
    reshard = f"reshard_after_forward={job.layout.regathers}"
    for path in dict.fromkeys(layer.rpartition(".")[0] for layer in job.layers):
        yield f"for layer in model.{path}:"
        yield f"    fully_shard(layer, mesh={part}, {reshard})"
    yield f"fully_shard(model, mesh={part}, {reshard})"


def _styles(job: Job) -> Iterator[tuple[str, str]]:
    """Yield a glob and its style for the layers that tensor parallelism splits."""
    found, sequence = job.layout.tensor_parallel, job.layout.model_parallel == "TP+SP"
    lies = "Shard(1)" if sequence else "Replicate()"
    tied = set(found.embeddings)
    for glob in _module_globs(found.embeddings):
        yield glob, f"RowwiseParallel(input_layouts=Replicate(), output_layouts={lies})"
    for glob in _module_globs(name for name in found.columns if name not in tied):
        yield glob, f"ColwiseParallel(input_layouts={lies})"
    for glob in _module_globs(found.rows):
        yield glob, f"RowwiseParallel(output_layouts={lies})"
    if sequence:
        norms = (name for name, kind in job.modules.items() if "norm" in kind.__name__.lower())
        for glob in glob_names(norms):
            yield glob, "SequenceParallel()"


def _module_globs(names: Iterable[str]) -> tuple[str, ...]:
    return glob_names(name.rpartition(".")[0] for name in names)


def _strided_notes(job: Job) -> Iterator[str]:
    """Yield a comment on fused weights, of whose parts each is in shards."""
    found = job.layout.tensor_parallel
    fused = _module_globs(name for name in (*found.columns, *found.rows) if found.shards.get(name, (0, 1))[1] > 1)
    if fused:
        yield f"# {', '.join(fused)}: queries, keys and values are fused; split them into layers of their own first."
