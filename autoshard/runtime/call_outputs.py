"""Outputs of a parallelised module's call, made from the local outputs of its program."""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autoshard.capture._torch import version_of
from autoshard.capture.call_layout import ResultLayout
from autoshard.capture.joint_graph import JointGraph
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep, ProgramTensor
from autoshard.runtime.placed_tensor import make_placed
from autoshard.runtime.program_maker import ProgramMaker
from autoshard.runtime.shards import redistribute, wrap
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec


@dataclass(frozen=True, slots=True)
class CallOutputs:
    """The form of a module's outputs.

    Attributes:
        device_mesh: the mesh of the module.
        data_axes: the mesh axes along which ranks have different rows.
        form: "whole": plain tensors where outputs are replicated, else `DTensor`s; "planned": `DTensor`s; "local": each
            rank's rows as plain tensors.
    """

    device_mesh: DeviceMesh
    data_axes: Collection[str]
    form: Literal["whole", "planned", "local"]

    @staticmethod
    def of(maker: ProgramMaker) -> CallOutputs:
        """Return the form that the options of a module request."""
        target = maker.target
        form: Literal["whole", "planned", "local"] = (
            "whole" if target.output_placements in (None, "auto") else "planned"
        )
        return CallOutputs(maker.device_mesh, target.data_axes, "local" if target.outputs == "local" else form)

    def wrap(self, local: torch.Tensor, border: ProgramTensor) -> torch.Tensor:
        """Return an output in the form for the user."""
        if border.spec.is_replicated and self.form != "planned":
            return local
        if self.form == "local":
            axes = MeshShape.of(self.device_mesh).axes
            rows = zip(border.spec.placements, axes, strict=True)
            parts = math.prod(axis.size for row, axis in rows if not row.is_replicate() and axis.name in self.data_axes)
            # The loss is the mean of the ranks' losses, as in `DistributedDataParallel`.
            if parts > 1 and local.requires_grad:
                # The gradient is None if the output is not used.
                local.register_hook(lambda gradient: None if gradient is None else gradient / parts)
            return local
        placed: torch.Tensor = OutputOnMesh.apply(local, self.device_mesh, border)
        return placed

    def restore_views(
        self, step: LocalStep, result: ResultLayout, outputs: list[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Replace outputs by views of the input or buffer whose memory they share, so that both see changes.
        Args:
            step: the step of the program.
            result: the result of the call.
            outputs: in the order of the result; replaced in place.
            sources: the caller's and the module's tensors, in the order of the program's inputs.
        """
        if not result.views or self.form != "whole":
            return
        changed = {border.name for border in step.forward_outputs if border.kind == "mutation"}
        inputs_by_name = {
            (border.kind, border.name): tensor for border, tensor in zip(step.inputs, sources, strict=False)
        }
        for place, name in enumerate(result.names):
            view = result.views.get(name)
            # The program computes the gradient through a view of an input.
            if view is None or (view.name not in changed and outputs[place].requires_grad):
                continue
            source = inputs_by_name[view.kind, view.name]
            restored = None if isinstance(source, DTensor) else view.of(source)
            if restored is not None and restored.shape == outputs[place].shape:
                outputs[place] = restored if view.is_itself or view.name in changed else restored.detach()

    def forbid_changes(self, graph: JointGraph, outputs: list[torch.Tensor]) -> None:
        """Let autograd refuse in-place changes of outputs that are in the histories of others on one device."""
        if not graph.histories.entangled:
            return
        for place, name in enumerate(graph.result.names):
            if name in graph.histories.entangled and outputs[place].requires_grad:
                outputs[place] = OutputInSharedMemory.apply(outputs[place])

    def restore_same(
        self, step: LocalStep, graph: JointGraph, outputs: list[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Replace outputs that are an input or another output by that object. Arguments as for `restore_views`."""
        if not graph.histories.same:
            return
        names = graph.result.names
        tensors = dict(zip((("output", name) for name in names), outputs, strict=False))
        if self.form == "whole":
            borders = zip(step.inputs, sources, strict=False)
            tensors |= {(border.kind, border.name): tensor for border, tensor in borders if border.kind == "input"}
        for place, name in enumerate(names):
            original = tensors.get(graph.histories.same.get(name, ("", "")))
            if original is not None:
                outputs[place] = original


class OutputOnMesh(torch.autograd.Function):
    """An output as a placed tensor that shares the memory of the local tensor.

    Torch's `DTensor.from_local` fails in torch 2.11 for an output that receives no gradient.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, device_mesh: DeviceMesh, border: ProgramTensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        # Each term of a sum over ranks has the gradient of the sum.
        ctx.placements = tuple(Replicate() if each.is_partial() else each for each in border.spec.placements)
        return make_placed(wrap(local.detach(), device_mesh, border.spec, border.shape, local.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: DTensor | None) -> tuple[torch.Tensor | None, None, None]:
        return None if gradient is None else redistribute(gradient, ctx.placements).to_local(), None, None


class OutputInSharedMemory(torch.autograd.Function):
    """The identity as a view; torch's error about an in-place change contains the name of this class."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor) -> torch.Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class ReturnedParameters:
    """Outputs that are whole copies of sharded parameters, where one device returns the parameters or views of them.

    An in-place change of such a copy would be lost. The next call raises an error about it.
    """

    def __init__(self) -> None:
        self._held: list[tuple[str, str, weakref.ref[torch.Tensor], int]] = []

    def watch(
        self, step: LocalStep, graph: JointGraph, outputs: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]
    ) -> None:
        """Watch a call's outputs instead of earlier ones. Arguments as for `CallOutputs.restore_views`."""
        parameters = graph.histories.of_parameters
        if not parameters and not self._held:
            return
        placed = {border.name: tensor for border, tensor in zip(step.inputs, sources, strict=False)}
        self._held = [
            (name, parameters[name], weakref.ref(output), version_of(output))
            for name, output in zip(graph.result.names, outputs, strict=True)
            if name in parameters and not output.is_inference() and not _is_whole(placed.get(parameters[name]))
        ]

    def check(self) -> None:
        """Raise an `InputError` if a watched output was changed since the call."""
        for name, parameter, reference, version in self._held:
            output = reference()
            if output is not None and version_of(output) != version:
                self._held = []
                raise InputError(
                    f"{name}, an output of the last call, was changed in place. On one device it shares memory with "
                    f"the parameter {parameter}, and that changes, too; here it is a copy, since the parameter is in "
                    f"shards, and the change is lost. Change model.get_parameter({parameter!r}) itself, under "
                    "torch.no_grad(), or a clone of the output."
                )


def _is_whole(tensor: torch.Tensor | None) -> bool:
    return not isinstance(tensor, DTensor) or Spec(tuple(tensor.placements)).is_replicated
