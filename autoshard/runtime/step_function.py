"""A local step as one autograd function, on the user's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from autoshard.capture._torch import transforms_active
from autoshard.capture.capture_errors import running_line
from autoshard.capture.output_taps import TAP
from autoshard.errors import InputError
from autoshard.program.localize import LocalStep
from autoshard.runtime._torch import dtensor_spec_of, is_batched, is_view
from autoshard.runtime.gradient_sums import OpenSums
from autoshard.runtime.parameter_gradients import ParameterGradients, autograd_gradient
from autoshard.runtime.step import RunnableStep
from autoshard.size import Sizes, at


def run_step(program: RunnableStep, tensors: Sequence[torch.Tensor], sizes: Sizes) -> list[torch.Tensor]:
    """Run the forward half under autograd, and return its local outputs in the order of the step.

    Args:
        program: the step.
        tensors: one for every input except tangents: DTensors for parameters, local tensors for the rest.
        sizes: the call's dynamic sizes, if any.
    """
    if program.halves.backward is None:
        with torch.no_grad():
            return list(program.forward(program.local(tensors, sizes), sizes)[0])
    histories = [_history(tensor) for tensor in tensors if tensor.requires_grad]
    return list(_ProgramFunction.apply(program, sizes, histories, *tensors))


class _ProgramFunction(torch.autograd.Function):
    """The two halves as one differentiable function of DTensor parameters and local inputs."""

    @staticmethod
    def forward(
        ctx: Any, program: RunnableStep, sizes: Sizes, histories: list[torch.Tensor], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        locals_ = program.local(tensors, sizes)
        seed = program.ranks.seed(program.halves.draws)
        outputs, saved = program.forward(locals_, sizes, seed)
        outputs = _without_views(outputs)
        ctx.program, ctx.sizes, ctx.seed, ctx.histories = program, sizes, seed, histories
        # Missing gradients remain None: zeros would cost computation, and create a `.grad` where there is none.
        ctx.set_materialize_grads(False)
        # Autograd refuses a backward whose saved tensors were changed. An optimizer changes the version of a
        # parameter's DTensor, but not of its local tensor, so DTensors of saved local tensors are saved, too.
        held = {id(tensor) for tensor in saved}
        pairs = zip(tensors, locals_, strict=True)
        parameters = [tensor for tensor, local in pairs if isinstance(tensor, DTensor) and id(local) in held]
        ctx.save_for_backward(*saved, *parameters)
        ctx.count = len(saved)
        ctx.specs = [dtensor_spec_of(tensor) if isinstance(tensor, DTensor) else None for tensor in tensors]
        waits = program.later is not None or program.sums is not None
        ctx.parameters = [tensor if waits and isinstance(tensor, DTensor) else None for tensor in tensors]
        ctx.whole, ctx.versions = None, []
        if program.general is not None or program.between is not None:
            # These programs run forward again from the inputs before the step, because buffers may change.
            former = program.step.former_values
            inputs = zip(locals_, program.step.inputs, strict=False)
            ctx.whole = [tensor.clone() if border.name in former else tensor for tensor, border in inputs]
            ctx.versions = [(tensor, tensor._version) for tensor in tensors if isinstance(tensor, DTensor)]
        tangents = {border.name for border in program.step.tangents}
        plain = [
            tensor
            for tensor, border in zip(outputs, program.step.forward_outputs, strict=True)
            if border.kind == "mutation"
            or not (tensor.is_floating_point() or tensor.is_complex())
            or (program.histories is not None and border.name not in program.histories.differentiable)
            # The general program has a tangent for every output that requires a gradient.
            or (program.general is None and border.name not in tangents)
        ]
        ctx.mark_non_differentiable(*plain)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_transforms(gradients)
        try:
            with torch.no_grad():
                results = _gradients(ctx, gradients)
        except RuntimeError as error:
            if ctx.program.order is not None:
                ctx.program.order.raise_failure(error)
            raise
        # With create_graph=True.
        if torch.is_grad_enabled():
            results = _LastDerivative.apply(len(ctx.histories), *ctx.histories, *results)
        return (None, None, None, *results)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> NoReturn:
        raise InputError(
            "a parallelised module has no derivative in forward mode (torch.autograd.forward_ad, torch.func.jvp): its "
            "programs are a forward and a backward. Take gradients by backward or torch.autograd.grad."
        )


def refuse_transforms(gradients: Sequence[torch.Tensor | None] = ()) -> None:
    """Refuse a call, or a backward of gradients, in a `torch.func` transform: programs cannot take its tensors."""
    if transforms_active() or any(gradient is not None and is_batched(gradient) for gradient in gradients):
        raise InputError(
            f"{running_line()} runs a parallelised module in a transform of torch.func (vmap, grad, jacrev, ...) or in "
            "a vectorized backward (is_grads_batched=True, vectorize=True). Its programs take plain tensors: call the "
            "module outside of it, and differentiate what it returns by backward or torch.autograd.grad, once for "
            "every row of a Jacobian; or use torch.vmap inside of forward, where it is part of the step."
        )


class _LastDerivative(torch.autograd.Function):
    """The identity of gradients, with an error for its derivative: autograd would treat them as constants.

    Its first arguments are the tensors on which the gradients depend, so that derivatives by these reach it.
    """

    @staticmethod
    def forward(ctx: Any, histories: int, *tensors: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return tuple(None if gradient is None else gradient.view_as(gradient) for gradient in tensors[histories:])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> NoReturn:
        raise InputError(
            "a gradient of a parallelised module is differentiated again (create_graph=True, as for a penalty on "
            "gradients), and its programs hold first derivatives alone. Compute what depends on the gradient in "
            "forward: there torch.autograd.grad(outputs, inputs, create_graph=True) is part of the step, and its loss "
            "can be returned. If the gradient is meant as a constant, use gradient.detach()."
        )


def _without_views(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Detach outputs that are views, since autograd refuses in-place changes of views that a function returns."""
    return [tensor.detach() if is_view(tensor) else tensor for tensor in tensors]


def _history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with this tensor's autograd history that does not keep its memory alive."""
    if tensor.is_leaf or tensor.ndim == 0 or isinstance(tensor, DTensor):
        return tensor
    return tensor.narrow(0, 0, 0).sum()


def _gradients(ctx: Any, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return gradients with respect to the tensors that a program was run with, given those of its outputs."""
    program: RunnableStep = ctx.program
    step = program.step
    gradient_of_output = dict(zip((border.name for border in step.forward_outputs), gradients, strict=True))
    expected = [border.name for border in step.tangents]
    if program.accumulation is not None:
        program.accumulation.forget_zeroed()
    sums = program.sums if isinstance(program.sums, OpenSums) else None
    # Parameters that have only earlier sums get gradients, too.
    summed = set() if sums is None else set(sums.names)
    if any(gradient is not None and name not in expected for name, gradient in gradient_of_output.items()):
        step, results = _differentiate_all(ctx, program, gradient_of_output)
    else:
        if program.general is not None and program.order is not None:
            # Other ranks may be about to make the general program.
            program.order.begin_known({})
        saved = list(ctx.saved_tensors[: ctx.count])
        # Frees saved tensors after their last use, unless the graph is retained.
        ctx.maybe_clear_saved_tensors()
        tangents = [gradient_of_output[name] for name in expected]
        parameters = ParameterGradients(program, ctx.parameters)
        if program.later is None:
            local_gradients = parameters.backward(saved, tangents, ctx.sizes)
        else:
            local_gradients, rest = program.backward_of_inputs(saved, tangents, ctx.sizes)
            program.later.append(lambda: parameters.backward_of_parameters(rest))
        results = {step.gradients[place].name: gradient for place, gradient in local_gradients.items()}
    arrived = {name for name, gradient in gradient_of_output.items() if gradient is not None}
    # For None, autograd does not change `.grad`; zeros would create one.
    takes_part = summed | {name for name, sources in step.gradient_sources.items() if sources & arrived}
    if sums is not None and not sums.is_last_backward:
        ParameterGradients(program, ctx.parameters).keep_sums(sums, takes_part)
    elif program.accumulation is not None and not program.accumulation.active:
        # Sums of other programs, or of this one if another program ran its backward.
        program.accumulation.reduce_rest()
    return [
        autograd_gradient(program, at(border, ctx.sizes), results[border.name], spec)
        if border.name in results and border.name in takes_part
        else None
        for border, spec in zip(program.step.inputs, ctx.specs, strict=False)
    ]


def _differentiate_all(
    ctx: Any, program: RunnableStep, gradient_of_output: dict[str, torch.Tensor | None]
) -> tuple[LocalStep, dict[str, torch.Tensor]]:
    """Return gradients if more than the loss is differentiated: the general program runs both halves."""
    assert program.general is not None
    _check_unchanged(ctx, "a gradient arrived for an output besides the loss")
    general = program.general()
    _, saved = general.forward(ctx.whole, ctx.sizes, ctx.seed)
    gradients = general.backward(
        list(saved), [gradient_of_output[border.name] for border in general.step.tangents], ctx.sizes
    )
    return general.step, dict(zip((border.name for border in general.step.gradients), gradients, strict=True))


def _check_unchanged(ctx: Any, what: str) -> None:
    """Raise an `InputError` if parameters were changed since the forward, which another program must run again."""
    assert ctx.whole is not None
    if any(tensor._version != version for tensor, version in ctx.versions):
        raise InputError(
            f"{what}, and parameters were changed since the forward: they were modified by an inplace operation, such "
            "as an optimizer's step. Call backward before it."
        )


def is_program(node: Any) -> bool:
    """Return True for the autograd node of a program's run."""
    return isinstance(getattr(node, "program", None), RunnableStep)


def gradients_between(ctx: Any, name: str, gradient: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the gradients of one output with respect to the outputs from which it is computed, by name.

    Args:
        ctx: the program's run, an autograd node.
        name: the name of the output.
        gradient: the gradient of the output, whole.

    Raises:
        AutoshardError: there is no such program.
    """
    program: RunnableStep = ctx.program
    if program.between is None:
        raise InputError("outputs are not whole, or sizes are dynamic")
    _check_unchanged(ctx, "a gradient of an output for another one is asked for")
    with torch.no_grad():
        between = program.between()
        mesh, device = program.ranks.mesh, program.ranks.device
        borders = [border for border in between.step.inputs if border.kind != "tangent"]
        taps = [
            torch.zeros(border.local_shape(mesh), dtype=border.dtype, device=device)
            for border in borders[len(ctx.whole) :]
        ]
        _, saved = between.forward([*ctx.whole, *taps], ctx.sizes, ctx.seed)
        tangents = [gradient if border.name == name else None for border in between.step.tangents]
        results = between.backward(list(saved), tangents, ctx.sizes)
    if torch.is_grad_enabled():
        results = list(_LastDerivative.apply(len(ctx.histories) + 1, *ctx.histories, gradient, *results))
    return {
        border.name.removeprefix(TAP): result
        for border, result in zip(between.step.gradients, results, strict=True)
        if border.name.startswith(TAP)
    }
