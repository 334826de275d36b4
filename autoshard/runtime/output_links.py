"""Gradients of a call's outputs with respect to its other outputs, such as of scores with respect to features.

A program is one autograd node, and all outputs are its siblings. After it, every output that is computed from other
outputs gets its own node with these as inputs, as on one device. Gradients with respect to them are computed on
request: by `retain_grad`, by a hook, or by `inputs` of `backward` and `torch.autograd.grad`.
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
    """The shared state of one call's links.

    Attributes:
        outputs: the linked outputs by name, with their hooks; weak references, since outputs may be large.
        task: the id of the latest autograd run.
        reported: the gradients with respect to outputs that links computed in this run, by name.
    """

    outputs: dict[str, tuple[weakref.ref[torch.Tensor], Mapping[Any, Any]]] = field(default_factory=dict)
    task: int = -1
    reported: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def begin(self) -> None:
        """Drop what was reported in an earlier autograd run."""
        if self.task != graph_task():
            self.task, self.reported = graph_task(), {}

    def is_watched(self, name: str) -> bool:
        """Return True if an output retains its gradient, or has a hook."""
        output, hooks = self.outputs[name]
        tensor = output()
        return bool(hooks) or (tensor is not None and tensor.retains_grad)

    def is_alive(self, name: str) -> bool:
        return self.outputs[name][0]() is not None


def link_outputs(histories: OutputHistories, outputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the outputs that are computed from others, and these others, linked as on one device.

    Args:
        histories: the output histories of one device.
        outputs: the outputs of one program, by name.
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
    # An output has more ancestors than any of its ancestors.
    order = sorted((name for name in candidates if name in inner or candidates[name]), key=lambda n: len(candidates[n]))
    if not order:
        return {}
    links = _CallLinks()
    linked: dict[str, torch.Tensor] = {}
    # A leaf that takes part in every autograd run except those with `inputs`.
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
    """An output, linked to the outputs from which it is computed."""

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
        # A view that autograd refuses to change remains a view.
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
    """Return an output's gradient without the part that came through other outputs of the program.

    The program's own backward includes that part.
    """
    if gradient is None or not reported:
        return gradient
    if len(reported) == 1 and reported[0] is gradient:
        return None
    return gradient - sum(reported[1:], reported[0])


def _between(ctx: Any, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the requested gradients with respect to ancestors of an output."""
    links: _CallLinks = ctx.links
    probe, program, *ancestors = (node for node, _ in ctx.next_functions)
    asked = [name for name in ctx.ancestors if links.is_watched(name)]
    is_certain = bool(asked)
    if not will_execute(probe):
        # Only some gradients are requested. Autograd does not say which: any executed live ancestor may be meant.
        asked += [
            name
            for name, node in zip(ctx.ancestors, ancestors, strict=True)
            if name not in asked and links.is_alive(name) and will_execute(node)
        ]
    if not asked:
        return {}
    while not is_program(program):
        program = program.next_functions[0][0]
    # If gradients of parameters are computed, too, these may be the only ones requested.
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
