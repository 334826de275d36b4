"""Adafactor for sharded parameters, which torch's Adafactor does not support."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from autoshard.runtime.shards import local_of, wrap
from autoshard.specs.spec import Spec


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` for parameters of any placements: each rank updates its shards, with its own factors.

    The arguments and the numbers are those of torch's; `foreach` has no effect. All ranks step together. Sums over
    sharded dims are reduced: a row, a column and two numbers per parameter. The factors in the state are placed like
    the dims that they keep.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters that have gradients; return the closure's result."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, self.state[parameter], group)
        return loss


def _update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
    shards = _Shards(parameter)
    value, gradient = local_of(parameter), local_of(parameter.grad)  # type: ignore[arg-type]
    gradient = -gradient if group["maximize"] else gradient
    if not state:
        state["step"] = torch.tensor(0.0)
        if gradient.ndim > 1:
            state["row_var"] = shards.zeros(value, parameter, (-1,))
            state["col_var"] = shards.zeros(value, parameter, (-2,))
        else:
            state["variance"] = shards.zeros(value, parameter, ())
    state["step"] += 1
    step, lr = state["step"].item(), float(group["lr"])
    smallest, scale = group["eps"]
    smallest = torch.finfo(parameter.dtype).eps if smallest is None else smallest
    weight = step ** group["beta2_decay"]
    alpha = max(scale, shards.root_mean_square(value)) * min(lr, 1 / step**0.5)
    if group["weight_decay"] != 0:
        value.mul_(1 - lr * group["weight_decay"])
    if gradient.ndim > 1:
        row, column = local_of(state["row_var"]), local_of(state["col_var"])
        for factor, dim in ((row, -1), (column, -2)):
            # Unlike `square().sum()`, a norm allocates no tensor of the gradient's size.
            squares = torch.linalg.vector_norm(gradient, dim=dim, keepdim=True).square_()
            factor.lerp_(shards.sum(squares, (dim,)) / parameter.size(dim), weight)
        variance = row @ column
        mean = shards.sum(row.sum(dim=-2, keepdim=True), (-2,)) / parameter.size(-2)
        variance /= mean.clamp_(min=smallest)
    else:
        kept = local_of(state["variance"])
        kept.lerp_(gradient * gradient, weight)
        variance = kept.clone()
    update = variance.clamp_(min=smallest * smallest).rsqrt_().mul_(gradient)
    value.add_(update, alpha=-alpha / max(1.0, shards.root_mean_square(update) / group["d"]))


class _Shards:
    """The dims of a parameter that mesh axes shard, and sums over them; a plain parameter has none."""

    def __init__(self, parameter: Tensor) -> None:
        self._ndim, self._elements = parameter.ndim, parameter.numel()
        self._mesh: DeviceMesh | None = parameter.device_mesh if isinstance(parameter, DTensor) else None
        self._placements: Sequence[Placement] = parameter.placements if isinstance(parameter, DTensor) else ()

    def _is_over(self, placement: Placement, dims: Sequence[int]) -> bool:
        return not placement.is_replicate() and placement.dim - self._ndim in dims  # type: ignore[attr-defined]

    def sum(self, local: Tensor, dims: Sequence[int]) -> Tensor:
        """All-reduce local sums over `dims`, counted from the last, in place, along the axes that shard these dims."""
        for axis, placement in enumerate(self._placements):
            if self._is_over(placement, dims):
                assert self._mesh is not None
                dist.all_reduce(local, group=self._mesh.get_group(axis))
        return local

    def root_mean_square(self, local: Tensor) -> float:
        """Return the root mean square of a tensor with the parameter's shape, over all shards."""
        squares = torch.linalg.vector_norm(local).square_()
        return (self.sum(squares, range(-self._ndim, 0)).item() / max(1, self._elements)) ** 0.5

    def zeros(self, local: Tensor, parameter: Tensor, dims: Sequence[int]) -> Tensor:
        """Return zeros of the shape and the placements of the parameter, with one element along `dims`."""

        def shape(size: Sequence[int]) -> tuple[int, ...]:
            return tuple(1 if dim - self._ndim in dims else length for dim, length in enumerate(size))

        zeros = local.new_zeros(shape(local.shape))
        if self._mesh is None:
            return zeros
        spec = Spec.of(*(Replicate() if self._is_over(each, dims) else each for each in self._placements))
        return wrap(zeros, self._mesh, spec, shape(parameter.shape), parameter.dtype)
