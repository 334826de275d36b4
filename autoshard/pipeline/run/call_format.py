"""Conversion of calls of a whole model to inputs of microbatches, and of their outputs to those of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.capture.export import ExportedInput
from autoshard.capture.python_state import PythonState
from autoshard.errors import InputError, PipelineError
from autoshard.pipeline.graph.forward_export import ExportedModule
from autoshard.pipeline.graph.microbatch import BatchCall
from autoshard.pipeline.run.loss_counts import target_count
from autoshard.pipeline.run.stage_runtime import Inputs, Loss


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """The inputs, outputs and state of one kind of call of a model.

    Attributes:
        model: the model; its `forward` names the arguments.
        graph: of one microbatch.
        number: of microbatches.
        batch_dims: as of `BatchCall`.
    """

    model: nn.Module
    graph: ExportedModule
    number: int
    batch_dims: Mapping[str, int | None] | None = None

    @property
    def constants(self) -> frozenset[str]:
        """Names of tensors that stages hold, and that are neither parameters nor buffers of the model."""
        return frozenset(source.name for source in self.graph.forward.inputs if source.kind == "constant")

    @property
    def state(self) -> PythonState:
        """The Python state of the model that the graph depends on, and its effects on that state."""
        return self.graph.forward.state

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Inputs]:
        """Return the inputs of every microbatch of a call of this kind.

        Raises:
            InputError: the batch does not divide.
        """
        layout = self.graph.forward.call
        names = [leaf for leaf in layout.leaves if isinstance(leaf, str)]
        read = [source.name for source in self._inputs]
        batch: list[Inputs] = []
        for part in BatchCall(self.model, args, kwargs, self.batch_dims).split(self.number):
            inputs = dict(zip(names, layout.flatten(part.args, part.kwargs), strict=True))
            batch.append({name: inputs[name] for name in read})
        return batch

    def check(self) -> None:
        """Raise `InputError` if an input requires a gradient."""
        for source in self._inputs:
            if source.fake.requires_grad:
                raise InputError(
                    f"the input {source.name} requires a gradient, and a pipeline hands none back: pass "
                    f"{source.name}.detach(), or make it a parameter of the model."
                )

    @property
    def _inputs(self) -> list[ExportedInput]:
        return [source for source in self.graph.forward.inputs if source.kind == "input"]

    def join_outputs(self, outputs: Sequence[Sequence[torch.Tensor]], loss: torch.Tensor | None) -> Any:
        """Return the result of the model for a batch: the outputs of all microbatches joined, and its loss."""
        sizes = {source.fake.shape[0] for source in self._inputs if source.fake.ndim}
        joined = [_join_chunks(tensors, sizes) for tensors in zip(*outputs, strict=True)]
        output = self.loss()
        if output is not None and loss is not None:
            joined[output.place] = loss
        return self.graph.forward.result.unflatten(joined)

    def loss(self) -> Loss | None:
        """Return the output that training differentiates: the one called `loss`, or the only floating scalar.

        Raises:
            PipelineError: there are several floating scalars, and none is called `loss`.
        """
        forward = self.graph.forward
        scalars = {
            name: Loss(place, node.meta["val"].dtype, target_count(self.graph, node))
            for place, (name, node) in enumerate(zip(forward.result.names, forward.outputs, strict=True))
            if node.name in self.graph.differentiable and node.meta["val"].ndim == 0
        }
        if len(scalars) > 1 and "loss" not in scalars:
            raise PipelineError(
                f"{type(self.model).__name__} returns {len(scalars)} floating tensors without dims: "
                f"{', '.join(scalars)}. A pipeline differentiates one: return that under the name loss, in a "
                f"mapping, or return their sum alone."
            )
        return scalars.get("loss") or next(iter(scalars.values()), None)


def _join_chunks(tensors: Sequence[torch.Tensor], sizes: set[int]) -> torch.Tensor:
    first = tensors[0]
    if first.ndim == 0:
        return torch.stack(list(tensors)).mean(0) if first.is_floating_point() else tensors[-1]
    return torch.cat(list(tensors)) if first.shape[0] in sizes else tensors[-1]
