"""Gradients of outputs of a call for others of its outputs, such as those of scores for the features that they are of.

A program is one node of autograd, of which all outputs are siblings. Behind it, every output that is computed from
another one gets a node of its own, whose inputs are these, as on one device. What flows into them is computed when
somebody asks: by `retain_grad`, by a hook, or by `inputs` of `backward` and `torch.autograd.grad`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from autoshard.capture.output_history import OutputHistories
from autoshard.errors import AutoshardError, InputError
from autoshard.runtime._torch import graph_task, hooks_of, is_view, will_execute
from autoshard.runtime.step_function import gradients_between, is_program

_NEEDS_OTHER_OUTPUTS = (
    "a gradient of {output} for {ancestors}, another output of the same call, is asked for (by retain_grad, a hook, or "
    "inputs of torch.autograd.grad or backward). The programs of this module have none: {reason}. Compute what needs "
    "it in forward, where torch.autograd.grad(scores, features) is part of the step, and return the result; or "
    "parallelize the module with whole outputs and without dynamic sizes."
)


@dataclass(slots=True, eq=False)
class _CallLinks:
    """What the links of one call share.

    Attributes:
        outputs: the linked outputs by name: weak references, since they may be large, and their hooks.
        task: the number of the latest run of autograd.
        reported: in this run, the gradients that links gave to outputs, by name.
    """

    outputs: dict[str, tuple[weakref.ref[torch.Tensor], Mapping[Any, Any]]] = field(default_factory=dict)
    task: int = -1
    reported: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Forget what was reported in an earlier run of autograd."""
        if self.task != graph_task():
            self.task, self.reported = graph_task(), {}

    def is_watched(self, name: str) -> bool:
        """Return True if an output keeps its gradient, or has a hook."""
        output, hooks = self.outputs[name]
        tensor = output()
        return bool(hooks) or (tensor is not None and tensor.retains_grad)

    def is_alive(self, name: str) -> bool:
        return self.outputs[name][0]() is not None


def link_outputs(histories: OutputHistories, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs of a call that are computed from others, and these, linked as on one device.

    Args:
        histories: those of one device.
        outputs: of one program, by name.
    """
    candidates = {
        name: tuple(
            ancestor
            for ancestor in histories.ancestors.get(name, ())
            if outputs[ancestor].requires_grad and ancestor not in histories.same
        )
        for name, output in outputs.items()
        if output.requires_grad and name not in histories.same
    }
    inner = {ancestor for ancestors in candidates.values() for ancestor in ancestors}
    # An output has more ancestors than each of them.
    order = sorted((name for name in candidates if name in inner or candidates[name]), key=lambda n: len(candidates[n]))
    if not order:
        return {}
    links = _CallLinks()
    linked: dict[str, torch.Tensor] = {}
    # A leaf that takes part in every run of autograd that no `inputs` confine.
    probe = torch.empty(0, requires_grad=True)
    for name in order:
        ancestors = candidates[name]
        output = OutputOfParallelisedModule.apply(
            links, name, ancestors, probe, outputs[name], *(linked[each] for each in ancestors)
        )
        linked[name] = output
        links.outputs[name] = weakref.ref(output), hooks_of(output) if name in inner else {}
    return linked


class OutputOfParallelisedModule(torch.autograd.Function):
    """An output with the outputs that it is computed from."""

    @staticmethod
    def forward(
        ctx: Any,
        links: _CallLinks,
        name: str,
        ancestors: tuple[str, ...],
        probe: torch.Tensor,
        output: torch.Tensor,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        ctx.links, ctx.name, ctx.ancestors = links, name, ancestors
        ctx.set_materialize_grads(False)
        # A view that autograd refuses to change stays one.
        return output.view_as(output) if is_view(output) else output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        links: _CallLinks = ctx.links
        links.begin()
        own = _without(gradient, links.reported.pop(ctx.name, []))
        between = {} if own is None or not ctx.ancestors else _between(ctx, own)
        for name, tensor in between.items():
            links.reported.setdefault(name, []).append(tensor)
        return (None, None, None, None, own, *(between.get(name) for name in ctx.ancestors))


def _without(gradient: torch.Tensor | None, reported: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the part of the gradient of an output that did not come from other outputs of the program.

    The program's own backward carries gradients from output to output already.
    """
    if gradient is None or not reported:
        return gradient
    if len(reported) == 1 and reported[0] is gradient:
        return None
    return gradient - sum(reported[1:], reported[0])


def _between(ctx: Any, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients for those ancestors of an output for which somebody asks."""
    links: _CallLinks = ctx.links
    probe, program, *ancestors = (node for node, _ in ctx.next_functions)
    asked = [name for name in ctx.ancestors if links.is_watched(name)]
    is_certain = bool(asked)
    if not will_execute(probe):
        # The gradients of some tensors only: of which, an ancestor among them, autograd does not say.
        asked += [
            name
            for name, node in zip(ctx.ancestors, ancestors, strict=True)
            if name not in asked and links.is_alive(name) and will_execute(node)
        ]
    if not asked:
        return {}
    while not is_program(program):
        program = program.next_functions[0][0]
    # Where gradients of parameters are computed, too, it may be that only these are asked for.
    is_certain = is_certain or not will_execute(program)
    try:
        found = gradients_between(program, ctx.name, gradient)
    except AutoshardError as error:
        if not is_certain:
            return {}
        raise InputError(
            _NEEDS_OTHER_OUTPUTS.format(output=ctx.name, ancestors=" and ".join(asked), reason=str(error).rstrip("."))
        ) from error
    return {name: found[name] for name in asked if name in found}
