"""What users do to parameters and gradients between two calls."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Change = Callable[[nn.Module, nn.Parameter], object]


def _last_row(tensor: Tensor) -> Tensor:
    return tensor[tensor.shape[0] - 1]


def _perturb_and_restore(module: nn.Module, parameter: nn.Parameter) -> None:
    """As sharpness-aware minimisation does."""
    kept = parameter.data.clone()
    parameter.add_(parameter, alpha=0.1)
    _last_row(parameter).zero_()
    parameter.data = kept


def _draw_anew(module: nn.Module, parameter: nn.Parameter) -> None:
    initialise = nn.init.xavier_uniform_ if parameter.ndim > 1 else nn.init.uniform_
    initialise(parameter)


def _swap(module: nn.Module, parameter: nn.Parameter) -> None:
    first, last = parameter[0].clone(), _last_row(parameter).clone()
    parameter[0], parameter[parameter.shape[0] - 1] = last, first


def _add_noise_to_gradients(module: nn.Module, parameter: nn.Parameter) -> None:
    gradient = parameter.grad
    if gradient is not None:
        _last_row(gradient).zero_()
        gradient.add_(torch.randn_like(gradient), alpha=0.01)


CHANGES: dict[str, Change] = {
    "clamp data": lambda module, parameter: setattr(parameter, "data", parameter.data.clamp(-0.5, 0.5)),
    "data of a plain tensor": lambda module, parameter: setattr(
        parameter, "data", torch.linspace(-1, 1, parameter.numel(), dtype=parameter.dtype).view(parameter.shape)
    ),
    "zero a row": lambda module, parameter: _last_row(parameter).zero_(),
    "scale pieces": lambda module, parameter: [
        piece.mul_(1 - 0.1 * place) for place, piece in enumerate(parameter.chunk(3))
    ],
    "add to every other one": lambda module, parameter: parameter.view(-1)[::2].add_(0.1),
    "set a mask": lambda module, parameter: parameter.__setitem__(parameter > 0.3, 0.3),
    "swap rows": _swap,
    "perturb and restore": _perturb_and_restore,
    "draw anew": _draw_anew,
    "noise": lambda module, parameter: parameter.add_(torch.randn_like(parameter), alpha=0.1),
    "noise in gradients": _add_noise_to_gradients,
    "vector": lambda module, parameter: vector_to_parameters(
        parameters_to_vector(module.parameters()) * 0.9, module.parameters()
    ),
}


def change(module: nn.Module, name: str, seed: int) -> None:
    """Make a change of one parameter of a module, the same with every call with a seed."""
    parameters = [parameter for parameter in module.parameters() if parameter.ndim]
    torch.manual_seed(seed)
    with torch.no_grad():
        CHANGES[name](module, random.Random(seed).choice(parameters))
