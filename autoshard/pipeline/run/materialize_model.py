"""`materialize` of whatever `parallelize` returns."""

from __future__ import annotations

import torch

from autoshard.pipeline.run.pipeline_module import PipelineModule
from autoshard.runtime.materialize import Initializer, Model, materialize_module


def materialize(model: Model, device: torch.device | str | None = None, init: Initializer | None = None) -> Model:
    """Allocate and initialise what a parallelised module has on the meta device, in place.

    Every rank holds its shards, of a `PipelineModule` those of its stages. Beside these it holds, one parameter at a
    time, the whole tensor that is drawn and the part that is cut from it. What an initialiser comes back to after
    others, as to the projections of Hugging Face's GPT-2, which are drawn twice, is put together again from the ranks
    that have it, and is there twice while it is; gloo's threads let go of what they have sent a moment after they say
    so. A parameter that no stage uses stays whole to the end.
    Parameters stay the same objects. They are initialised by `init`, called for every submodule of the model, children
    first; else by the model's own `init_weights()` (Hugging Face, torchtitan); else by `reset_parameters()` of every
    submodule that has it and holds something on the meta device. The numbers are those that one device draws, from the
    random state of rank 0. All ranks call this together.

    Args:
        model: what `parallelize` returned.
        device: where to; by default the mesh's device type.
        init: initialises the parameters and buffers of one submodule in place, as if they were whole.

    Returns:
        The model.

    Raises:
        InputError: the model is not parallelised; the device is of another type than the mesh; or something has not
            been initialised.
    """
    if isinstance(model, PipelineModule):
        model.materialize(device, init)
        return model
    return materialize_module(model, device, init)
