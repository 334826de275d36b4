"""Gradients of a program's parameters: computed by one backward, summed over several, and added to `.grad`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from autoshard.program.localize import ProgramTensor
from autoshard.runtime._torch import DTensorSpec, dtensor_spec_of
from autoshard.runtime.gradient_sums import OpenSums
from autoshard.runtime.placed_tensor import placed_as
from autoshard.runtime.step import RunnableStep, run_graph
from autoshard.size import Sizes


@dataclass(frozen=True, slots=True)
class ParameterGradients:
    """Gradients of a program's parameters, some of which are computed and accumulated outside autograd.

    A gradient is identified by its index among the step's gradients; `tensors` are the parameters among the inputs.
    """

    program: RunnableStep
    tensors: Sequence[DTensor | None]

    @torch.no_grad()
    def backward(
        self, saved: list[torch.Tensor], tangents: Sequence[torch.Tensor | None], sizes: Sizes
    ) -> dict[int, torch.Tensor]:
        """Run the backward half, and return the gradients that do not wait for further backwards."""
        graph = self.program.halves.backward
        assert graph is not None
        arguments = self.program.arguments(saved, tangents, sizes)
        return self._run(lambda: dict(enumerate(run_graph(graph, arguments))), arguments)

    @torch.no_grad()
    def backward_of_parameters(self, kept: list[Any]) -> None:
        """Run the second part of the backward half on the arguments that the first part kept."""
        assert self.program.halves.parts is not None
        _, second = self.program.halves.parts
        self._accumulate(self._run(lambda: dict(zip(second.makes, run_graph(second.graph, kept), strict=True)), kept))

    def _run(self, run: Callable[[], dict[int, torch.Tensor]], arguments: list[Any]) -> dict[int, torch.Tensor]:
        """Return the gradients of one run, except those to be summed; the last run reduces the sums."""
        reduction, sums = self.program.halves.reduction, self.program.sums
        if reduction is None or sums is None:
            return run()
        if not sums.is_last_backward:
            gradients = run()
            sums.add([gradients.pop(place) for place in reduction.places])
            return gradients
        if sums.is_empty:
            gradients = run()
            return gradients | self._reduce([gradients[place] for place in reduction.places])
        # Run another graph instead, which also takes the sums.
        last, end = reduction.last, reduction.end
        candidates = [*arguments, *sums.take()]
        arguments.clear()
        last_arguments = [candidates[place] for place in last.takes]
        candidates.clear()
        results = run_graph(last.graph, last_arguments)
        if end is not None:
            pending = results[len(last.makes) :]

            def await_rest() -> dict[int, torch.Tensor]:
                return dict(zip(end.makes, run_graph(end.graph, pending), strict=True))

            if isinstance(sums, OpenSums):
                return dict(zip(last.makes, results, strict=False)) | await_rest()
            # Other stages of the rank compute while these reductions run.
            sums.defer(lambda: self._accumulate(await_rest()))
        return dict(zip(last.makes, results, strict=False))

    def _reduce(self, gradients: list[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return reduced gradients, given in the order in which they are summed; the list is emptied."""
        reduction = self.program.halves.reduction
        assert reduction is not None
        return dict(zip(reduction.places, run_graph(reduction.alone, gradients), strict=True))

    def keep_sums(self, sums: OpenSums, takes_part: Set[str]) -> None:
        """Keep the sums that a backward added to; give the smallest parameter a gradient of zeros as a witness."""
        step, mesh, reduction = self.program.step, self.program.ranks.mesh, self.program.halves.reduction
        assert reduction is not None
        deferred = [step.gradients[place] for place in reduction.places]
        deferred = [border for border in deferred if border.name in takes_part]
        if not deferred:
            return
        smallest = min(deferred, key=lambda border: math.prod(border.local_shape(mesh)))
        border, witness = self._parameters()[smallest.name]
        if witness.grad is None:
            # Set here, because autograd would set it only after all backwards of the pass.
            zeros = torch.zeros(border.local_shape(mesh), dtype=border.dtype, device=self.program.ranks.device)
            witness.grad = autograd_gradient(self.program, border, zeros, dtensor_spec_of(witness))
        sums.keep({border.name for border in deferred}, witness, lambda: self._reduce_sums(sums))

    @torch.no_grad()
    def _reduce_sums(self, sums: OpenSums) -> None:
        """Reduce the sums separately, and add them to `.grad`."""
        names, step = set(sums.names), self.program.step
        gradients = self._reduce(sums.take())
        self._accumulate(
            {place: gradient for place, gradient in gradients.items() if step.gradients[place].name in names}
        )

    def _parameters(self) -> dict[str, tuple[ProgramTensor, DTensor]]:
        pairs = zip(self.program.step.inputs, self.tensors, strict=False)
        return {border.name: (border, parameter) for border, parameter in pairs if parameter is not None}

    @torch.no_grad()
    def _accumulate(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients to `.grad` and run hooks, as at the end of a backward; free each afterwards."""
        step = self.program.step
        parameters = self._parameters()
        for place in list(gradients):
            border, parameter = parameters[step.gradients[place].name]
            spec = dtensor_spec_of(parameter)
            torch.autograd.backward([parameter], [autograd_gradient(self.program, border, gradients.pop(place), spec)])


def autograd_gradient(
    program: RunnableStep, border: ProgramTensor, gradient: torch.Tensor | None, spec: DTensorSpec | None
) -> torch.Tensor | None:
    """Return a gradient for autograd: without padding, and as a placed tensor with the spec of its parameter."""
    if gradient is None:
        return None
    gradient = program.unpad(gradient, border)
    return gradient if spec is None else placed_as(gradient, spec)
