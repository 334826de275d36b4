"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    GradAOTOutput,  # an output that is a gradient, and of which input
    InputMutationAOTOutput,  # an output that is the new value of a mutated input
    PlainAOTInput,  # an input of the traced graph, by position
    PlainAOTOutput,  # an output of the traced graph, by position
    TangentAOTInput,  # the gradient that the backward half starts from, and of which output
)
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # forward and backward in one graph
from torch._ops import OpOverload  # the type of an operator such as torch.ops.aten.mm.default
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,  # a Python number is asked of a tensor that has none
    DynamicOutputShapeException,  # a result whose size depends on numbers is asked of tensors that have none
    FakeTensor,  # a tensor with a device, and no numbers
    FakeTensorMode,
)
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard  # no public name yet
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx.experimental.symbolic_shapes import ShapeEnv  # lets data-dependent sizes be named in errors
from torch.nn.parameter import is_lazy  # parameters whose shape is not known yet
from torch.utils import _pytree as pytree  # nested containers of tensors, as torch.export sees them
from torch.utils._python_dispatch import (
    TorchDispatchMode,  # sees every operator that is called while it is active
    _disable_current_modes,  # capture is not seen by modes active around it
)

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "GradAOTOutput",
    "InputKind",
    "InputMutationAOTOutput",
    "OpOverload",
    "PlainAOTInput",
    "PlainAOTOutput",
    "StridedShard",
    "TangentAOTInput",
    "TensorArgument",
    "TorchDispatchMode",
    "fake_mode",
    "is_lazy",
    "outside_modes",
    "pytree",
    "survey_mode",
    "trace_joint",
]


def fake_mode() -> FakeTensorMode:
    """A fake tensor mode that accepts the real constants a module holds."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)


def survey_mode() -> FakeTensorMode:
    """A fake tensor mode in which whatever depends on numbers raises an error, and names no size."""
    return FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)


def outside_modes() -> contextlib.AbstractContextManager[Any]:
    """Context in which no dispatch mode of the caller (fake, local or other tensors) is active."""
    return _disable_current_modes()


def trace_joint(module: fx.GraphModule, inputs: tuple[torch.Tensor, ...]) -> fx.GraphModule:
    """The functional graph of forward and backward, each placeholder and output described in `meta["desc"]`."""
    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, module, inputs).graph_module
