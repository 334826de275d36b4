"""Calls with a batch as calls of microbatches, their results put together again, and the weights of their losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from autoshard.capture._torch import pytree
from autoshard.capture.call_layout import call_layout
from autoshard.capture.export import Exported, ExportedInput
from autoshard.capture.nodes import closure, is_random
from autoshard.capture.python.state import PythonState
from autoshard.errors import InputError, PipelineError
from autoshard.pipeline.graph.microbatch_step import MicrobatchStep

# Name of the dynamic size of the samples in a microbatch.
BATCH = "batch"


@dataclass(frozen=True, slots=True, eq=False)
class BatchCall:
    """A call of a module with a batch.

    Attributes:
        module: the called module; its forward names positional arguments.
        args, kwargs: the call; tensors may be on the meta device.
        batch_dims: for inputs by name (such as `input_ids` or `batch['x']`), the dim that counts samples, or None for a
            tensor that every microbatch gets whole. The default is dim 0; tensors without dims are whole.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch_dims: Mapping[str, int | None] | None = None

    def split(self, number: int) -> list[BatchCall]:
        """Return the calls of so many microbatches, with equal parts of the tensors along the batch, which are views.

        Raises:
            InputError: the number of microbatches does not divide the batch, tensors differ in their number of samples,
                or `batch_dims` names no tensor or no dim of one.
        """
        if isinstance(number, bool) or not isinstance(number, int) or number < 1:
            raise InputError(f"{number!r} is no number of microbatches: it is one or more.")
        names, leaves, structure = self._named_leaves()
        tensors, dims = self._tensors_and_dims()
        size = _samples(tensors, dims, number)
        parts = []
        for place in range(number):
            cut = {name: tensors[name].narrow(dim, place * size, size) for name, dim in dims.items()}
            chosen = [
                cut.get(name, leaf) if isinstance(name, str) else leaf for name, leaf in zip(names, leaves, strict=True)
            ]
            args, kwargs = structure.unflatten(chosen)
            parts.append(replace(self, args=args, kwargs=kwargs))
        return parts

    @property
    def samples(self) -> int:
        """The number of samples of the batch; raises as `split` does."""
        return _samples(*self._tensors_and_dims(), 1)

    @property
    def dynamic_sizes(self) -> dict[str, dict[int, str]]:
        """The dim that counts samples of every tensor that has one, as a dynamic size for `capture`."""
        _, dims = self._tensors_and_dims()
        return {name: {dim: BATCH} for name, dim in dims.items()}

    def _named_leaves(self) -> tuple[Sequence[Any], list[Any], pytree.TreeSpec]:
        leaves, structure = pytree.tree_flatten((self.args, dict(self.kwargs)))
        return call_layout(self.module, structure, leaves).leaves, leaves, structure

    def _tensors_and_dims(self) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
        """Return the tensors of the call by their names, and the dim that counts samples of those that have one."""
        # Only tensors have names; other leaves are plain values, the same in all microbatches.
        names, leaves, _ = self._named_leaves()
        tensors = {name: leaf for name, leaf in zip(names, leaves, strict=True) if isinstance(name, str)}
        requested = self.batch_dims or {}
        for name, dim in requested.items():
            if name not in tensors:
                raise InputError(f"batch_dims names {name!r}, which is no tensor of the call: {', '.join(tensors)}.")
            if dim is not None and not -tensors[name].ndim <= dim < tensors[name].ndim:
                raise InputError(f"batch_dims[{name!r}] is {dim}, and the tensor has {tensors[name].ndim} dims.")
        chosen = {name: requested.get(name, 0 if tensor.ndim else None) for name, tensor in tensors.items()}
        return tensors, {name: dim % tensors[name].ndim for name, dim in chosen.items() if dim is not None}


def _samples(tensors: Mapping[str, torch.Tensor], dims: Mapping[str, int], number: int) -> int:
    """Return the number of samples in a microbatch."""
    sizes = {name: tensors[name].shape[dim] for name, dim in dims.items()}
    if not sizes:
        raise InputError(f"the call has no tensor with a batch to split in {number} microbatches.")
    first, batch = next(iter(sizes.items()))
    for name, size in sizes.items():
        if size != batch:
            raise InputError(
                f"{first} has {batch} samples (dim {dims[first]}), {name} has {size} (dim {dims[name]}). Say in "
                f"batch_dims which dim counts samples, or {{{name!r}: None}} for a tensor that all microbatches need."
            )
    if batch % number:
        fitting = [str(count) for count in range(1, batch + 1) if batch % count == 0]
        raise InputError(
            f"a batch of {batch} samples cannot be split into {number} equal microbatches: use "
            f"{', '.join(fitting[:-1])}{' or ' if len(fitting) > 1 else ''}{fitting[-1]}, or another batch size."
        )
    return batch // number


aten = torch.ops.aten

# Losses that may be means over targets, with the names of their arguments, the defaults, and the number of "mean".
_LOSSES = (aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default)
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index")
_DEFAULTS = {"weight": None, "reduction": 1, "ignore_index": -100}
_MEAN = 1
# Operators that hand a loss on as it is, but for its shape and dtype.
_SAME = (aten.to.dtype, aten.alias.default, aten.view.default, aten.reshape.default, aten.contiguous.default)

Inputs = Mapping[str, torch.Tensor]
"""The inputs of one microbatch by their names."""

Count = Callable[[Mapping[str, torch.Tensor]], torch.Tensor]
"""Returns the number of targets that count in a microbatch, from its inputs by their names."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The output that is differentiated.

    Attributes:
        place: the position among the outputs.
        dtype: its dtype.
        count: the number of targets that count in a microbatch, where the loss is a mean over targets; else None.
    """

    place: int
    dtype: torch.dtype
    count: Count | None = None

    def share(self, outputs: Sequence[torch.Tensor], part: torch.Tensor) -> torch.Tensor:
        """Return the loss of a microbatch times its `part` of the batch."""
        value = outputs[self.place]
        # The mean over no targets is NaN; such a microbatch adds nothing to the batch's mean.
        return torch.where(part == 0, value.new_zeros(()), value * part)


def target_count(exported: Exported, loss: fx.Node) -> Count | None:
    """Return a function that counts the targets of a microbatch's loss, where the loss is their mean.

    Args:
        exported: the forward graph of one microbatch.
        loss: the output that is differentiated.

    Returns:
        The function, where the loss is a cross-entropy or negative log likelihood without weights of classes, and its
        targets depend on inputs alone. None for all other losses.
    """
    # The loss may be a view or a cast of what the operator returns.
    while loss.target in _SAME:
        loss = loss.all_input_nodes[0]
    if loss.target not in _LOSSES:
        return None
    arguments: dict[str, Any] = {**_DEFAULTS, **dict(zip(_ARGUMENTS, loss.args, strict=False)), **loss.kwargs}
    target = arguments["target"]
    if arguments["weight"] is not None or arguments["reduction"] != _MEAN or target.meta["val"].is_floating_point():
        return None
    program = _count_program(exported, target, arguments["ignore_index"])
    if program is None:
        return None
    read = {node.target for node in program.graph.find_nodes(op="placeholder")}
    names = {source.name: str(node.target) for node, source in exported.placeholders.items() if node.target in read}

    def count(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return program(**{node: inputs[name] for name, node in names.items()})

    return count


def loss_shares(count: Count | None, microbatches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor:
    """Return the share of every microbatch in the loss of the batch: a vector whose sum is 1."""
    if count is None:
        return torch.full((len(microbatches),), 1 / len(microbatches), dtype=torch.float64)
    # In float64, so that shares of many tokens are exact to the digits of the loss.
    counts = torch.stack([count(inputs) for inputs in microbatches]).double()
    return counts / counts.sum()


def _count_program(exported: Exported, target: fx.Node, ignored: int) -> fx.GraphModule | None:
    """Return a program that computes targets from inputs and counts them; None where they depend on anything else."""
    # A count that is drawn, or depends on parameters, could not be known before the step.
    needed, sources = closure([target], lambda node: node.all_input_nodes), exported.placeholders
    fixed = any(node.op == "get_attr" or (node in sources and sources[node].kind != "input") for node in needed)
    if fixed or any(map(is_random, needed)):
        return None
    program = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in exported.graph.nodes:
        if node in needed:
            copies[node] = program.node_copy(node, copies.__getitem__)
    counts = program.call_function(aten.ne.Scalar, (copies[target], ignored))
    program.output(program.call_function(aten.sum.default, (counts,)))
    return fx.GraphModule(nn.Module(), program)


@dataclass(frozen=True, slots=True, eq=False)
class CallFormat:
    """The inputs, outputs and state of one kind of call of a model.

    Attributes:
        model: the model; its `forward` names the arguments.
        step: of one microbatch.
        number: of microbatches.
        batch_dims: as of `BatchCall`.
    """

    model: nn.Module
    step: MicrobatchStep
    number: int
    batch_dims: Mapping[str, int | None] | None = None

    @property
    def state(self) -> PythonState:
        """The Python state of the model that the graph depends on, and its effects on that state."""
        return self.step.exported.state

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Inputs]:
        """Return the inputs of every microbatch of a call of this kind.

        Raises:
            InputError: the batch does not divide.
        """
        layout = self.step.exported.call
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
        return [source for source in self.step.exported.inputs if source.kind == "input"]

    def join_outputs(self, outputs: Sequence[Sequence[torch.Tensor]], loss: torch.Tensor | None) -> Any:
        """Return the result of the model for a batch: the outputs of all microbatches joined, and its loss."""
        inputs = (node.meta["val"] for node, item in self.step.sources.items() if item.kind == "input")
        sizes = {value.shape[0] for value in inputs if value.ndim}
        joined = [_join_chunks(tensors, sizes) for tensors in zip(*outputs, strict=True)]
        # The loss weighs microbatches by their targets, so it is not the mean of theirs.
        output = self.loss()
        if output is not None and loss is not None:
            joined[output.place] = loss
        return self.step.exported.result.unflatten(joined)

    def loss(self) -> Loss | None:
        """Return the output that training differentiates: the one called `loss`, or the only floating scalar.

        Raises:
            PipelineError: there are several floating scalars, and none is called `loss`.
        """
        exported, differentiable = self.step.exported, self.step.joint.histories.differentiable
        scalars = {
            name: Loss(place, node.meta["val"].dtype, target_count(exported, node))
            for place, (name, node) in enumerate(zip(exported.result.names, exported.outputs, strict=True))
            if name in differentiable and node.meta["val"].ndim == 0
        }
        if len(scalars) > 1 and "loss" not in scalars:
            raise PipelineError(
                f"{type(self.model).__name__} returns {len(scalars)} floating tensors without dims: "
                f"{', '.join(scalars)}. A pipeline differentiates one: return that under the name loss, in a "
                f"mapping, or return their sum alone."
            )
        return scalars.get("loss") or next(iter(scalars.values()), None)


def _join_chunks(tensors: Sequence[torch.Tensor], sizes: set[int]) -> torch.Tensor:
    # Without dims: a mean is one of equal microbatches, and a number such as a count of steps is that of the last.
    first = tensors[0]
    if first.ndim == 0:
        return torch.stack(list(tensors)).mean(0) if first.is_floating_point() else tensors[-1]
    return torch.cat(list(tensors)) if first.shape[0] in sizes else tensors[-1]
