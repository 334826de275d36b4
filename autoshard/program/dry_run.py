"""Costs of the calls of an exported graph, forward and backward: each is run on fake tensors and recorded."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from autoshard.capture import outside_modes
from autoshard.capture.python.called_code import PythonCall
from autoshard.cluster.cost import CostModel
from autoshard.program._torch import FakeTensorMode, TorchDispatchMode, memory_of
from autoshard.program.program_replay import kernel_seconds, tensors


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
        needs_gradient: for every result, True if it has a gradient.
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
    """Prices the calls of forward graphs; each distinct call is run once.

    A call is run on fake tensors in a mode that records its kernels. Then autograd runs its derivative in the same
    mode, and hooks record the tensors that it saves. So backward is priced by the kernels that it will run: a product
    of two operands that need gradients costs twice the forward, and one whose operands need none costs nothing.
    """

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost
        self._mode = FakeTensorMode(allow_non_fake_inputs=True, static_shapes=True)
        self._known: dict[str, CallCost] = {}

    def call_cost(self, node: fx.Node, needs_gradient: Sequence[bool]) -> CallCost:
        """Return the costs of one call; operands are counted as in `node.all_input_nodes`.

        Args:
            node: a call of an operator; `meta["val"]` of its operands are fake tensors.
            needs_gradient: for every one of `node.all_input_nodes`, True if it needs one.
        """
        if node.target is operator.getitem:
            return CallCost()
        key = _key(node, needs_gradient)
        if key not in self._known:
            with outside_modes(), torch.enable_grad(), self._mode:
                self._known[key] = self._run(node, needs_gradient)
        return self._known[key]

    def _run(self, node: fx.Node, needs_gradient: Sequence[bool]) -> CallCost:
        leaves, operands = [], {}
        is_mutable = getattr(getattr(node.target, "_schema", None), "is_mutable", False)
        if isinstance(node.target, PythonCall):
            is_mutable = node.target.changes_operands
        for source, needs in zip(node.all_input_nodes, needs_gradient, strict=True):
            leaf, operands[source] = _make_operand(source, needs, is_mutable)
            leaves.append(leaf)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)
        recorder = _CostRecorder(self.cost)
        with recorder, torch.autograd.graph.saved_tensors_hooks(recorder.record_saved, lambda saved: saved):
            results = list(tensors(_run_call(node, args, kwargs)))
        positions = {
            memory_of(value): place for place, value in enumerate(operands.values()) if isinstance(value, Tensor)
        }
        # A result in an operand's memory counts as that operand.
        result_positions = {key: place for place, key in enumerate(map(memory_of, results)) if key not in positions}
        saved = recorder.saved
        cost = CallCost(
            forward_seconds=recorder.take_seconds(),
            saved_operands=tuple(sorted(positions[key] for key in saved if key in positions)),
            saved_results=tuple(sorted(result_positions[key] for key in saved if key in result_positions)),
            saved_inside=sum(size for key, size in saved.items() if key not in {*positions, *result_positions}),
            aliases=tuple(positions.get(memory_of(value)) for value in results),
            result_bytes=tuple(value.untyped_storage().nbytes() for value in results),
            needs_gradient=tuple(value.requires_grad for value in results),
        )
        return replace(cost, backward_seconds=_backward_seconds(cost, recorder, results, leaves))


def _backward_seconds(
    cost: CallCost, recorder: _CostRecorder, results: Sequence[Tensor], leaves: Sequence[object]
) -> float:
    """Run the derivative of a call and return its seconds."""
    differentiated = [value for value in results if value.requires_grad]
    wanted = [value for value in tensors(leaves) if value.requires_grad]
    if not differentiated:
        return 0.0
    gradients = [torch.empty_like(value) for value in differentiated]
    try:
        with recorder:
            torch.autograd.grad(differentiated, wanted, gradients, allow_unused=True)
    except RuntimeError:
        # Autograd knows no derivative. As for a product, that of two operands takes twice the forward.
        return cost.forward_seconds * min(2, len(wanted))
    return recorder.take_seconds()


class _CostRecorder(TorchDispatchMode):
    """Adds up the seconds of the kernels that run, and records the tensors that autograd saves."""

    def __init__(self, cost: CostModel) -> None:
        super().__init__()
        self.cost = cost
        # Memory of a saved tensor -> its bytes.
        self.saved: dict[int, int] = {}
        self._seconds = 0.0
        # Memory is named by identity, so saved tensors stay alive as long as the recorder.
        self._alive: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        results = func(*args, **kwargs)
        # Questions about sizes and devices are dispatched too, and give no tensors.
        if any(True for _ in tensors(results)):
            self._seconds += kernel_seconds(self.cost, func, (*args, *kwargs.values()), results, args)
        return results

    def record_saved(self, saved: Tensor) -> Tensor:
        self._alive.append(saved)
        self.saved[memory_of(saved)] = saved.untyped_storage().nbytes()
        return saved

    def take_seconds(self) -> float:
        """Return the seconds since the last time."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _make_operand(source: fx.Node, needs_gradient: bool, is_changed: bool) -> tuple[Any, Any]:
    """Return a leaf like an operand, and the argument of the call."""
    value: Any = source.meta.get("val")
    if source.op == "get_attr" and not isinstance(value, Tensor):
        # The graph of a region under another gradient mode or autocast.
        return None, operator.attrgetter(str(source.target))(source.graph.owning_module)
    if not isinstance(value, Tensor):
        return value, value
    shape, strides = tuple(value.shape), tuple(value.stride())
    leaf = torch.empty_strided(shape, strides, dtype=value.dtype, device=value.device)
    leaf.requires_grad_(needs_gradient)
    # Autograd refuses to change a leaf in place.
    return leaf, leaf.clone() if is_changed else leaf


def _run_call(node: fx.Node, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run what a call runs, on these arguments."""
    context: contextlib.AbstractContextManager[Any]
    match str(node.target):
        # Regions under another gradient mode or autocast: their graph runs in that context.
        case "wrap_with_set_grad_enabled":
            enabled, region, *operands = args
            context = torch.set_grad_enabled(enabled)
        case "wrap_with_autocast":
            device, dtype, enabled, cached, region, *operands = args
            context = torch.autocast(device, dtype, enabled, cached)
        case _:
            call: Any = node.target.run_alone if isinstance(node.target, PythonCall) else node.target
            return call(*args, **kwargs)
    with context:
        return region(*operands)


def _key(node: fx.Node, needs_gradient: Sequence[bool]) -> str:
    """Return a text that is the same for calls that do the same work."""

    def operand_text(place: int, source: fx.Node, needs: bool) -> str:
        value: Any = source.meta.get("val")
        if not isinstance(value, Tensor):
            return f"<{source.name}>"
        return f"<{place} {tuple(value.shape)} {tuple(value.stride())} {value.dtype} {needs}>"

    pairs = zip(node.all_input_nodes, needs_gradient, strict=True)
    operands = {source: operand_text(place, source, needs) for place, (source, needs) in enumerate(pairs)}
    return f"{node.target} {fx.node.map_arg((node.args, node.kwargs), operands.__getitem__)}"
