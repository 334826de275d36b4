"""`load_safetensors` for modules and pipelines that `parallelize` returns."""

from __future__ import annotations

import torch
from torch import nn

from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.runtime.safetensors import IncompatibleKeys, Paths, load_module


def load_safetensors(
    model: nn.Module, paths: Paths, *, strict: bool = True, device: torch.device | str | None = None
) -> IncompatibleKeys:
    """Fill the parameters and persistent buffers of a parallelised module from safetensors files, in place.

    Every rank reads its own slices, so that no rank ever holds a whole tensor that is sharded, and nothing is
    communicated. Parameters and buffers on the meta device are allocated.

    Args:
        model: the result of `parallelize`. Tied parameters are filled from any of their names. The files are of the
            whole model: every rank of a `PipelineModule` reads the tensors of its stages.
        paths: a file, several, an index (`model.safetensors.index.json`), or a folder with an index or files.
        strict: True if names that only the module or only the files have are an error; so are buffers on the meta
            device that are not persistent, which no file holds.
        device: the device of tensors that are on the meta device; by default the device type of the mesh.

    Returns:
        The names that only the module has, and those that only the files have.

    Raises:
        InputError: safetensors is not installed, a path is not valid, or names or shapes do not match. Nothing is
            changed then.
    """
    if isinstance(model, PipelineModule):
        return model.load_safetensors(paths, strict, device)
    return load_module(model, paths, strict=strict, device=device)
