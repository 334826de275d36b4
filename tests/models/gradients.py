"""Models whose `forward` says what their gradients are: functions with their own backward, hooks, gradients inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.autograd.functional import jvp
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tests.models.common import BATCH, HIDDEN, Model
from tests.releases import has, skip_without


class Round(Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (4 * x).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Reverse(Function):
    """The identity, with the gradient times a negative number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class PythonConstants(Function):
    """Makes tensors of Python numbers in both halves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.tensor(0.9, dtype=x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * torch.tensor([0.7] * HIDDEN, dtype=gradient.dtype)


class LeanLinear(Function):
    """A linear layer that saves input and weight alone; twice the gradient, to tell it from torch's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x = 2 * gradient @ weight if ctx.needs_input_grad[0] else None
        for_weight = 2 * gradient.t() @ x if ctx.needs_input_grad[1] else None
        for_bias = 2 * gradient.sum(0) if ctx.needs_input_grad[2] else None
        return for_x, for_weight, for_bias


class Largest(Function):
    """The largest of every row and where it is, of which only the first has a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.max(-1)
        ctx.mark_non_differentiable(places)
        ctx.save_for_backward(places)
        ctx.shape = x.shape
        return values, places

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> Tensor:
        (places,) = ctx.saved_tensors
        return 3 * torch.zeros(ctx.shape, dtype=gradient.dtype).scatter(1, places.unsqueeze(1), gradient.unsqueeze(1))


class Halves(Function):
    """Two results; backward is told None for the one that nothing uses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> Tensor | None:
        if second is None:
            return None if first is None else 5 * first
        return 7 * second if first is None else 11 * first + 13 * second


class DoubleInPlace(Function):
    """Changes its argument in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return 3 * gradient


class NestedFunctions(Function):
    """Calls other functions in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return Round.apply(x).exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return Reverse.apply(gradient, 2.0) * Round.apply(x)


class ScaleBy(Function):
    """The newer style, with a context apart."""

    @staticmethod
    def forward(x: Tensor, scales: dict[str, Any], power: int = 2) -> Tensor:
        return x**power * scales["by"]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, scales, power = inputs
        ctx.save_for_backward(x, output)
        ctx.scales, ctx.power = scales, power

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, output = ctx.saved_tensors
        return gradient * x * ctx.power * ctx.scales["by"] + output, None, None


class Once(Function):
    """With a backward that has no derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.sigmoid()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class RecomputeInBackward(Function):
    """Recomputes in backward, with gradients that it takes itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        x, weight = (one.detach().requires_grad_() for one in ctx.saved_tensors)
        with torch.enable_grad():
            result = torch.tanh(x @ weight)
        return torch.autograd.grad(result, (x, weight), 2 * gradient)


class Cast(Function):
    """Computes in another precision under autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float64)
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.exp()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


# As modules often name them, before anything is captured.
round_through = Round.apply
scale_by = ScaleBy.apply
largest = Largest.apply


class Small(nn.Module):
    """Two linear layers, and a weight; the subclasses say what happens between them. Further layers around them."""

    def __init__(self, layers: int = 0) -> None:
        super().__init__()
        self.before = nn.Sequential(*(nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh()) for _ in range(layers)))
        self.behind = nn.Sequential(*(nn.Sequential(nn.Tanh(), nn.Linear(HIDDEN, HIDDEN)) for _ in range(layers)))
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.second = nn.Linear(HIDDEN, HIDDEN)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, HIDDEN))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        y = self.second(self.between(self.first(self.before(x))))
        return functional.mse_loss(self.behind(y), target)

    def between(self, x: Tensor) -> Tensor:
        raise NotImplementedError


Between = Callable[[Small, Tensor], Tensor]


def _multiply_gradient(x: Tensor, factor: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * factor)
    return x


def _checkpoint_layer(model: Small, x: Tensor, reentrant: bool) -> Tensor:
    return checkpoint(lambda y: torch.tanh(model.second(y)) * model.scale, x, use_reentrant=reentrant)  # type: ignore[no-any-return]


def _hooked_late(model: Small, x: Tensor) -> Tensor:
    used_before = x.exp()
    mask = (x > 0).to(x.dtype)  # made of the very tensor whose gradient it changes
    x.register_hook(lambda gradient: gradient * mask)
    x.register_hook(lambda gradient: gradient + model.scale)
    return used_before + x


def _hooked_in_place(model: Small, x: Tensor) -> Tensor:
    y = x * 2
    y.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    y.mul_(model.scale)
    y.register_hook(lambda gradient: gradient * 3)
    return y


def _remove_hook(model: Small, x: Tensor) -> Tensor:
    handle = x.register_hook(lambda gradient: gradient * 5)
    handle.remove()
    return x


def _hooked_parameter(model: Small, x: Tensor) -> Tensor:
    model.scale.register_hook(lambda gradient: gradient / gradient.norm())
    return x * model.scale


def _hooked_module(model: Small, x: Tensor) -> Tensor:
    handle = model.second.register_full_backward_hook(
        lambda layer, made, taken: (made[0] * 2 + taken[0] @ layer.weight,)
    )
    y = model.second(torch.tanh(x))
    handle.remove()
    return y


def _multiply_by_force(model: Small, x: Tensor) -> Tensor:
    energy = (torch.tanh(x) * model.scale).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return x * force


def _multiply_by_held_force(model: Small, x: Tensor) -> Tensor:
    energy = (scale_by(torch.tanh(x), {"by": 3.0}) * model.scale).sum()
    (force,) = torch.autograd.grad(energy, x, create_graph=True)
    return x * force


def _multiply_by_constant_force(model: Small, x: Tensor) -> Tensor:
    energy = (torch.sigmoid(x) * model.scale).sum()
    (force,) = torch.autograd.grad(energy, x, retain_graph=True)  # a constant to what follows
    return x * force


def _add_force_of_shift(model: Small, x: Tensor) -> Tensor:
    shift = torch.zeros_like(x, requires_grad=True)
    (force,) = torch.autograd.grad(((x + shift) ** 3 * model.scale).sum(), shift, create_graph=True)
    return x + force


def _mix_grad_modes(model: Small, x: Tensor) -> Tensor:
    with torch.no_grad():
        constant = round_through(x)
        with torch.enable_grad():
            kept = model.second(x)
    with torch.inference_mode():
        other = model.second(x)
    return x * constant + kept + other + x.detach() * x.data


def _several(model: Small, x: Tensor) -> Tensor:
    first, _ = Halves.apply(x)
    _, second = Halves.apply(x)
    return first + second + sum(Halves.apply(x))


def _marked_dirty(model: Small, x: Tensor) -> Tensor:
    y = x + 1
    DoubleInPlace.apply(y)
    return y * model.scale


def _under_autocast(model: Small, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=True):
        return Cast.apply(x).to(x.dtype)


class Gain(Function):
    """Multiplies by a weight that it reads of a module, and that so has no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        return x * layer.weight.diagonal()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.layer.bias, None


BETWEEN: dict[str, Between] = {
    "straight-through": lambda model, x: round_through(x),
    "reversal": lambda model, x: Reverse.apply(x, 0.5),
    "constants": lambda model, x: PythonConstants.apply(x),
    "lean linear": lambda model, x: LeanLinear.apply(x, model.second.weight, model.scale),
    "lean linear without bias": lambda model, x: LeanLinear.apply(x.detach(), model.second.weight, None),
    "non-differentiable": lambda model, x: x * Largest.apply(x)[0].unsqueeze(-1) + Largest.apply(x)[1].unsqueeze(-1),
    "several results": _several,
    "results of a function held by its method": lambda model, x: (
        x * largest(x)[0].unsqueeze(-1) + largest(x)[1][:, None]
    ),
    "context apart, held by its method": lambda model, x: scale_by(x, {"by": 3.0}) + scale_by(x, {"by": 2.0}, power=3),
    "gradient through a function held by its method": _multiply_by_held_force,
    "in place": _marked_dirty,
    "nested": lambda model, x: NestedFunctions.apply(x),
    "context apart": lambda model, x: ScaleBy.apply(x, {"by": 3.0}) + ScaleBy.apply(x, {"by": 2.0}, 3),
    "once differentiable": lambda model, x: Once.apply(x),
    "gradient in backward": lambda model, x: RecomputeInBackward.apply(x, model.second.weight),
    "reads a module": lambda model, x: Gain.apply(x, model.second),
    "autocast": _under_autocast,
    "reentrant checkpoint": lambda model, x: _checkpoint_layer(model, x, True),
    "reentrant checkpoint of inputs": lambda model, x: x + _checkpoint_layer(model, x.detach(), True),
    "checkpoint": lambda model, x: _checkpoint_layer(model, x, False),
    "hook": lambda model, x: _multiply_gradient(x, model.scale),
    "hooks set late": _hooked_late,
    "hook before a change in place": _hooked_in_place,
    "hook taken back": _remove_hook,
    "hook of a parameter": _hooked_parameter,
    "hook of a module": _hooked_module,
    "gradient inside": _multiply_by_force,
    "constant gradient inside": _multiply_by_constant_force,
    "gradient of a new tensor": _add_force_of_shift,
    "tangent": lambda model, x: torch.func.jvp(torch.tanh, (x,), (x * model.scale,))[1],
    "tangent by two gradients": lambda model, x: jvp(torch.tanh, x, x * model.scale, create_graph=True)[1],
    "no gradient": _mix_grad_modes,
}
"""What happens between the two layers, by name."""

_FEATURES = {
    "context apart, held by its method": "keyword arguments of autograd functions",
    "tangent": "export of torch.func.jvp",
}


def is_possible(name: str) -> bool:
    """Return True if this release of torch has what happens between the layers."""
    return name not in _FEATURES or has(_FEATURES[name])


def skip_between_layers(name: str) -> None:
    """Skip the running test where this release of torch lacks what happens between the layers."""
    if name in _FEATURES:
        skip_without(_FEATURES[name])


def gradients(name: str, dtype: torch.dtype = torch.float64, layers: int = 0) -> Model:
    """A small model that does what `BETWEEN[name]` says, and its inputs; with so many layers before and behind it."""
    torch.manual_seed(0)
    model = type("Gradients", (Small,), {"between": BETWEEN[name]})(layers).to(dtype)
    x, target = torch.randn(2, BATCH, HIDDEN, dtype=dtype)
    return model, {"x": x, "target": target}
