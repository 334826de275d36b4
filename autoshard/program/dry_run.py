"""What one call of an exported graph costs forward and backward: it is run on tensors without numbers and watched."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autoshard.capture import outside_modes
from autoshard.capture.python_calls import PythonCall
from autoshard.cluster.cost import CostModel
from autoshard.program._torch import FakeTensorMode, TorchDispatchMode, memory_of
from autoshard.program.kernels import kernel_seconds, tensors


@dataclass(frozen=True, slots=True)
class CallCost:
    """One call of a forward graph, on one device.

    Attributes:
        forward_seconds: of the kernels that it runs.
        backward_seconds: of the kernels of its derivative, for the operands that need gradients.
        saved_operands: the operands, by position, that backward reads.
        saved_results: the results, by position, that backward reads.
        saved_inside: bytes of other tensors that are kept for backward, such as statistics or masks of dropout.
        aliases: for every result, the position of the operand in whose memory it lies, or None.
        result_bytes: for every result, the bytes of the memory that it lies in.
        needs_gradient: for every result, whether it has a gradient.
    """

    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    saved_operands: tuple[int, ...] = ()
    saved_results: tuple[int, ...] = ()
    saved_inside: int = 0
    aliases: tuple[int | None, ...] = ()
    result_bytes: tuple[int, ...] = ()
    needs_gradient: tuple[bool, ...] = ()


class DryRun:
    """Prices the calls of forward graphs, each distinct one once.

    A call is run on fake tensors of the operands' shapes, in a mode that sees the kernels it comes down to: a
    convolution, a loss or an attention of any name. Where results have gradients, autograd then runs the derivative in
    the same mode, and its hooks tell what is saved. So the backward half is priced by the kernels that it will run: a
    product both of whose operands need gradients costs twice the forward, what needs none nothing.

    Args:
        cost: prices of the kernels.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self._known: dict[str, CallCost] = {}

    def call_cost(self, node: fx.Node, needs_gradient: Sequence[bool]) -> CallCost:
        """Prices of one call.

        Args:
            node: a call of an operator; `meta["val"]` of its operands are tensors, without numbers.
            needs_gradient: for every one of `node.all_input_nodes`, whether it does.

        Returns:
            Its costs; operands are counted as in `node.all_input_nodes`. An operator that autograd knows no derivative
            of counts the forward seconds twice in backward where several operands need gradients, once where one does.
        """
        if node.target is operator.getitem:
            return CallCost()
        key = _key(node, needs_gradient)
        if key not in self._known:
            with outside_modes(), torch.enable_grad(), self._mode:
                self._known[key] = self._run(node, needs_gradient)
        return self._known[key]

    def _run(self, node: fx.Node, needs_gradient: Sequence[bool]) -> CallCost:
        leaves, passed = [], {}
        for source, needs in zip(node.all_input_nodes, needs_gradient, strict=True):
            leaf, passed[source] = _make_operand(source, needs, _is_mutable(node))
            leaves.append(leaf)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), passed.__getitem__)
        watch = _CostRecorder(self.cost)
        with watch, torch.autograd.graph.saved_tensors_hooks(watch.record_saved, lambda saved: saved):
            results = list(tensors(_callable_of(node)(*args, **kwargs)))
        places = {memory_of(value): place for place, value in enumerate(passed.values()) if _is_tensor(value)}
        made = {key: place for place, key in enumerate(map(memory_of, results)) if key not in places}
        cost = CallCost(
            forward_seconds=watch.take_seconds(),
            saved_operands=tuple(sorted(places[key] for key in watch.saved if key in places)),
            saved_results=tuple(sorted(made[key] for key in watch.saved if key in made)),
            saved_inside=sum(size for key, size in watch.saved.items() if key not in places and key not in made),
            aliases=tuple(places.get(memory_of(value)) for value in results),
            result_bytes=tuple(value.untyped_storage().nbytes() for value in results),
            needs_gradient=tuple(value.requires_grad for value in results),
        )
        return replace(cost, backward_seconds=_backward_seconds(cost, watch, results, leaves))


def _backward_seconds(
    cost: CallCost, watch: _CostRecorder, results: Sequence[torch.Tensor], leaves: Sequence[object]
) -> float:
    """Seconds of the derivative, run in the watch's sight."""
    differentiated = [value for value in results if value.requires_grad]
    wanted = [value for value in tensors(leaves) if value.requires_grad]
    if not differentiated:
        return 0.0
    gradients = [torch.empty_like(value) for value in differentiated]
    try:
        with watch:
            torch.autograd.grad(differentiated, wanted, gradients, allow_unused=True)
    except RuntimeError:  # no derivative, or none of these operands
        return cost.forward_seconds * min(2, len(wanted))
    return watch.take_seconds()


class _CostRecorder(TorchDispatchMode):
    """Adds up the seconds of the kernels that run, and the tensors that autograd saves."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self.cost = cost
        self.saved: dict[int, int] = {}
        self._seconds = 0.0
        self._alive: list[torch.Tensor] = []  # what a key names by identity stays alive

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        if any(True for _ in tensors(results)):  # questions about sizes and devices come by here too
            self._seconds += kernel_seconds(self.cost, func, (*args, *kwargs.values()), results, args)
        return results

    def record_saved(self, saved: torch.Tensor) -> torch.Tensor:
        """Notes that a tensor is kept for backward."""
        self._alive.append(saved)
        self.saved[memory_of(saved)] = saved.untyped_storage().nbytes()
        return saved

    def take_seconds(self) -> float:
        """Seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _make_operand(source: fx.Node, needs_gradient: bool, changed: bool) -> tuple[Any, Any]:
    """A leaf like an operand, and what the call is given: a copy of it where the call may change it in place."""
    value: Any = source.meta.get("val")
    if source.op == "get_attr" and not _is_tensor(value):
        return None, _attribute(source)
    if not _is_tensor(value):
        return value, value
    shape, strides = tuple(value.shape), tuple(value.stride())
    leaf = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    leaf.requires_grad_(needs_gradient)
    return leaf, leaf.clone() if changed else leaf


def _attribute(source: fx.Node) -> Any:
    owner: Any = source.graph.owning_module
    for part in str(source.target).split("."):
        owner = getattr(owner, part)
    return owner


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _is_mutable(node: fx.Node) -> bool:
    if isinstance(node.target, PythonCall):
        return node.target.changes_operands
    return bool(getattr(getattr(node.target, "_schema", None), "is_mutable", False))


def _callable_of(node: fx.Node) -> Callable[..., Any]:
    """What the call runs; of a region under another gradient mode or autocast, its graph in that context."""
    match str(node.target):
        case "wrap_with_set_grad_enabled":
            return lambda enabled, region, *args: _call_in_context(torch.set_grad_enabled(enabled), region, args)
        case "wrap_with_autocast":
            return lambda device, dtype, enabled, cached, region, *args: _call_in_context(
                torch.autocast(device, dtype, enabled, cached), region, args
            )
    if isinstance(node.target, PythonCall):
        return node.target.run_alone
    assert callable(node.target)
    return node.target


def _call_in_context(
    context: contextlib.AbstractContextManager[Any], region: fx.GraphModule, args: Sequence[Any]
) -> Any:
    with context:
        return region(*args)


def _key(node: fx.Node, needs_gradient: Sequence[bool]) -> str:
    """Text that is the same for calls that do the same work."""
    operands = {
        source: _operand_text(place, source, needs)
        for place, (source, needs) in enumerate(zip(node.all_input_nodes, needs_gradient, strict=True))
    }
    return f"{node.target} {fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)}"


def _operand_text(place: int, source: fx.Node, needs_gradient: bool) -> str:
    value: Any = source.meta.get("val")
    if not _is_tensor(value):
        return f"<{source.name}>"
    return f"<{place} {tuple(value.shape)} {tuple(value.stride())} {value.dtype} {needs_gradient}>"
