"""TensorOpt 5.1 and 5.3, Fig. 8 and Table 4: the fastest plan beside data parallelism, and numbers of devices."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from frontier import Example, transformer, vgg16, wide_resnet

from autoshard.errors import BudgetError
from published.clusters import HOROVOD, TENSOROPT, mesh_of
from published.models import unfused, without_statistics
from published.part import Part, Row
from published.plans import data_parallel, free

Build = Callable[[float], Example]


_SIDE, _TOKENS = 128, 64
"""Pixels of WideResNet's images and tokens of Transformer's sentences, by the bytes on one GPU of Table 1."""


def _wide(depth: float) -> Example:
    module, inputs = wide_resnet(depth)
    images = inputs["images"]
    return without_statistics(module), {**inputs, "images": images.new_empty(*images.shape[:2], _SIDE, _SIDE)}


def _transformer(depth: float) -> Example:
    module, inputs = transformer(depth)
    return unfused(module), {name: tensor.new_empty(len(tensor), _TOKENS) for name, tensor in inputs.items()}


def _table(depth: float) -> Iterator[Row]:
    models: dict[str, tuple[Build, float, tuple[float, float, float]]] = {
        "VGG16": (vgg16, 1.0, (0.10, 0.16, 0.15)),
        "Transformer-S": (_transformer, 0.5, (1.16, 1.18, 1.04)),
        "WideResNet": (_wide, 1.0, (1.99, 2.89, 2.80)),
    }
    for name, (build, share, published) in models.items():
        make = functools.partial(_on_meta, build, share * depth)
        steps = (
            free(make(), mesh_of(16), TENSOROPT).step_seconds,
            data_parallel(make(), mesh_of(16), TENSOROPT).step_seconds,
            data_parallel(make(), mesh_of(16), HOROVOD).step_seconds,
        )
        for what, which in (("data parallel", 1), ("Horovod", 2)):
            ratio = published[0] / published[which]
            yield Row("TensorOpt Table 4", f"{name}, mini-time over {what}", ratio, steps[0] / steps[which])
        for what, which in (("mini-time", 0), ("data parallel", 1), ("Horovod", 2)):
            yield Row("TensorOpt Table 4", f"{name}, seconds of {what}", published[which], steps[which])


def _devices(depth: float) -> Iterator[Row]:
    for name, build in (("Transformer", _transformer), ("WideResNet", _wide)):
        make = functools.partial(_on_meta, build, depth)
        steps = {devices: _fitting(make(), devices) for devices in (8, 16)}
        fewest = next((devices for devices, step in steps.items() if step is not None), None)
        yield Row("TensorOpt Fig. 8", f"{name}, fewer of 8 and 16 GPUs that suffice", 8, fewest)
        both = None if steps[8] is None or steps[16] is None else steps[8] / steps[16]
        yield Row("TensorOpt Fig. 8", f"{name}, shortest step on 8 GPUs over that on 16", None, both)


def _fitting(example: Example, devices: int) -> float | None:
    """Seconds of the fastest plan that fits; None if there is none."""
    options = {"memory_limit": TENSOROPT.device.memory, "recompute": "none", "optimizer": "sgd", "time_limit": 60.0}
    try:
        return free(example, mesh_of(devices), TENSOROPT, **options).step_seconds
    except BudgetError:
        return None


def _on_meta(build: Build, depth: float) -> Example:
    with torch.device("meta"):
        return build(depth)


_SHAPES = (
    "The models' shapes are those of benchmarks/frontier.py (the paper tells parameters and batch alone). Sizes of "
    "inputs are by what Table 1 says one GPU would hold: images of WideResNet are 128 by 128, with which that is 89 "
    "GB (83 there; 257 with the usual 224), sentences of Transformer have 64 tokens, 65 GB (74 there; 124 with 128). "
    "Batch 256; float32; hosts of eight V100s with 16 GB and NVLink, 100 Gb/s between them; group norms in place of "
    "batch norms. Computation and communication add up, as they do in TensorOpt's Equation 3."
)
TABLE_PART = Part(
    "TensorOpt 5.3: 16 GPUs on two hosts",
    f"{_SHAPES} Transformer-S has six of the twelve layers (4.9 GB, the paper has 4.8). No memory limit. What is here "
    "for Horovod is data parallelism whose reductions run behind the backward half.",
    _table,
    "VGG-16: its convolutions alone have 1.5 TFLOP per GPU, 0.107 s at the rate of 14 TFLOP/s that matrices reach, "
    "and the paper's whole fastest step is 0.10 s: cuDNN computes convolutions of 3 by 3 by Winograd's method, in "
    "fewer operations than are counted here. Beyond its products, data parallelism takes 0.055 s here and the "
    "fastest plan 0.015; the paper's steps are 0.06 s apart. WideResNet: of its shape the paper tells the bytes "
    "alone. In ours (152 layers) three quarters of the parameters lie where images have 8 by 8 pixels and more; "
    "there a GPU exchanges 17 MB of a block's gradients with the other host, and would exchange 46 MB of "
    "activations, and as much of their gradients, if the hosts split the block: data parallelism is nearly the best "
    "plan. The paper's is 0.9 s faster than data parallelism, more than the 0.6 s in which a port carries all "
    "gradients once: its parameters must lie in layers with smaller activations. Seconds hang on the same.",
)
DEVICES_PART = Part(
    "TensorOpt Fig. 8: numbers of GPUs",
    f"{_SHAPES} Plain SGD without state and no recomputation (the paper says nothing of either). The text says that "
    "8 GPUs suffice and that 16 make the step only marginally shorter.",
    _devices,
)
