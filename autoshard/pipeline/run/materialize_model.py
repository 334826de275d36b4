"""`materialize` for modules and pipelines that `parallelize` returns."""

from __future__ import annotations

import torch

from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.runtime.materialize import Initializer, Model, materialize_module


def materialize(model: Model, device: torch.device | str | None = None, init: Initializer | None = None) -> Model:
    """Allocate and initialise the meta tensors of a parallelised module in place.

    Parameters stay the same objects. They are initialised by `init`, called for every submodule of the model, children
    first; else by the model's own `init_weights()` (Hugging Face, torchtitan); else by `reset_parameters()` of every
    submodule that has it and holds a meta tensor. The values are those that one device draws, from the random state of
    rank 0. All ranks call this together.

    Every rank holds its shards, of a `PipelineModule` those of its stages. Beside these it holds one whole tensor and
    the part that is cut from it at a time. A parameter that an initialiser draws again later, such as the projections
    of Hugging Face's GPT-2, is gathered from the ranks that hold it, and is held twice meanwhile; gloo's threads free
    a tensor a moment after it is sent. A parameter that no stage uses stays whole to the end.

    Args:
        model: the result of `parallelize`.
        device: the device of the tensors; by default the mesh's device type.
        init: initialises the parameters and buffers of one submodule in place, as if they were whole.

    Returns:
        The model.

    Raises:
        InputError: the model is not parallelised; the device is of another type than the mesh; or a parameter or
            buffer has not been initialised.
    """
    if isinstance(model, PipelineModule):
        model.materialize(device, init)
        return model
    return materialize_module(model, device, init)
