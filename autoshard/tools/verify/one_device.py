"""Training steps of a module on one device, in float64."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.joint import JointGraph
from autoshard.capture.python.returned_objects import record_objects
from autoshard.tools.verify.float64 import Float64Mode, widen_tensors


class TrainingOnOneDevice:
    """The module itself, which trains with the gradients of autograd.

    Args:
        call: of the module, in float64, whose parameters and buffers change.
        graph: of the captured step, which names outputs and inputs.
    """

    def __init__(self, call: BoundCall, graph: JointGraph) -> None:
        self.module = call.module
        self.graph = graph
        self._call = call

    @property
    def inputs(self) -> dict[str, Tensor]:
        """The tensors of the call, by name."""
        return self._tensors_by_name(self._call)

    def run(self, tangents: Mapping[str, Tensor], learning_rate: float) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Run a step, as `TrainingOnAllRanks.run` does; parameters without a gradient have one of zeros.

        Returns:
            The outputs and the gradients by name, gradients of inputs included.
        """
        call = self._call.with_leaves(widen_tensors(self._call.leaves))  # the module may change its inputs
        parameters = dict(self.module.named_parameters())
        for parameter in parameters.values():
            parameter.grad = None
        with Float64Mode(), torch.set_grad_enabled(bool(tangents)):
            outputs = self._outputs(self.module(*call.args, **call.kwargs))
            if tangents:
                torch.autograd.backward([outputs[name] for name in tangents], list(tangents.values()))
        sources = {**self._tensors_by_name(call), **parameters}
        gradients = {name: _gradient_of(sources[name]) for name in self.graph.gradients}
        with torch.no_grad():
            for name, parameter in parameters.items():
                if name in gradients:
                    parameter.sub_(learning_rate * gradients[name])
        return {name: value.detach() for name, value in outputs.items()}, gradients

    def _outputs(self, result: Any) -> dict[str, Tensor]:
        leaves = pytree.tree_leaves(record_objects(result))
        return {
            name: leaf
            for name, leaf in zip(self.graph.result.leaves, leaves, strict=True)
            if isinstance(name, str) and isinstance(leaf, Tensor)
        }

    def _tensors_by_name(self, call: BoundCall) -> dict[str, Tensor]:
        names = [leaf for leaf in self.graph.call.leaves if isinstance(leaf, str)]
        return dict(zip(names, call.tensors_of(self.graph.call), strict=True))


def _gradient_of(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
