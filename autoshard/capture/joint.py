"""`capture_call`: one functional graph of forward and backward from a call of a module."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture._torch import (
    GLOBAL_HOOKS,
    TangentAOTInput,
    fake_mode,
    outside_modes,
    set_gradients,
    trace_joint,
    unwritten_graphs,
    without_tracebacks,
)
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.call_layout import without_omitted_arguments
from autoshard.capture.canonical_order import canonicalize_order
from autoshard.capture.capture_device import DEVICE
from autoshard.capture.capture_errors import ModelError, capture_error, known_error
from autoshard.capture.changed_parameters import assign_changed_parameters
from autoshard.capture.describe import check_collectives, check_shapes, check_sizes, describe, simplify_step
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.export import Exported, export_forward
from autoshard.capture.joint_graph import JointGraph, JointInput, JointOutput, fingerprint
from autoshard.capture.marks import capturing, defaults_of, keeping_marks
from autoshard.capture.mixed_precision import LoweredModule, autocast_of_gpus
from autoshard.capture.output_history import HistoryWatch, OutputHistories, enables_gradients, histories_of
from autoshard.capture.output_taps import with_taps
from autoshard.capture.python.fake_module import fake_like
from autoshard.capture.python.gradient_code import no_accumulation
from autoshard.capture.python.module_hooks import HooksInForward, Key
from autoshard.capture.python.state import StateWatch
from autoshard.capture.releases import warn_of_untried_release
from autoshard.capture.replacements import current_replacements
from autoshard.capture.step_marks import MarkedStep, StepMarks, merge_views
from autoshard.capture.unread_outputs import without_unread_outputs
from autoshard.errors import AutoshardError, warn_caller

aten = torch.ops.aten

__all__ = [
    "JointGraph",
    "JointInput",
    "JointOutput",
    "Tangents",
    "capture",
    "capture_call",
    "capture_marked",
    "export_call",
]

Tangents = Literal["loss", "all"] | tuple[str, ...]
"""The outputs that are differentiated, as `capture` documents it."""


@dataclass(frozen=True, slots=True)
class CaptureOptions:
    """How a call is captured.

    Attributes:
        tangents: "loss": if some outputs are differentiable scalars, only these are differentiated, and gradients into
            other outputs are not propagated; "all": every differentiable output is; names of outputs: every one is,
            for these outputs instead of for parameters and inputs.
        dynamic: for inputs by name, the dims whose sizes later calls may change, each with a name (dims of one name
            are of one size) or a `torch.export.Dim`. The graph then holds `DynamicSize`s.
        mp_policy: precisions of parameters, inputs, outputs and reductions, as casts in the graph. A flat module
            (`capture.flat_modules`) has those of the forward half already.
        devices: that the step is planned for; losses whose logits would be large on each of them are computed in pieces
            (`loss_in_pieces`). None: no loss is.
        logits_room: bytes of each device for whole logits, in place of a fixed number of logits that are large: zero
            for losses in pieces, infinite for whole ones.
        unread_outputs: globs over names of outputs that training does not read. Where gradients of a loss are computed,
            the graph has no such outputs, and the call returns None there.
        progress: called with the name of every part of the work when it begins.
    """

    tangents: Tangents = "loss"
    dynamic: Dynamic | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    devices: int | None = None
    logits_room: float | None = None
    unread_outputs: Sequence[str] = ()
    progress: Callable[[str], None] = lambda _: None


def capture(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, grad: bool = True, **options: Any
) -> JointGraph:
    """Capture a call that is not bound yet: arguments as for `BoundCall.of`, and the fields of `CaptureOptions`."""
    return capture_call(BoundCall.of(module, args, kwargs, grad), CaptureOptions(**options))


def capture_call(call: BoundCall, options: CaptureOptions) -> JointGraph:
    """Capture a call as a joint graph, on fake tensors: real weights are never touched.

    The fake tensors are on the CPU wherever the module is, so that the graph is the same on every machine. The program
    of a rank is made for its device.

    Args:
        call: its parameters may be real, on the meta device, or DTensors, of global shapes; its tensors real, meta or
            fake ones, or DTensors, captured as if contiguous. The graph has the forward alone where no gradients are
            wanted, or nothing requires one.
        options: how.

    Returns:
        The graph, with dead code, identities and common subexpressions removed.

    Raises:
        CaptureError: the module cannot be captured as one graph; the message names the line of the user's code.
        InputError: an argument is of a type that cannot be part of a signature.
    """
    begin, tangents = options.progress, options.tangents
    with _export_once(call, options) as (signature, exported):
        if isinstance(tangents, tuple):
            exported = with_taps(exported, tangents)
        begin(f"trace of forward and backward, {len(exported.graph.nodes)} nodes in forward")
        traced, histories = _trace_losses(exported, call.grad, everything=tangents != "loss")
    begin(f"simplification of {len(traced.graph.nodes)} nodes")
    joint = simplify_step(describe(traced, exported, signature, defaults_of(call.module)), options.mp_policy)
    return replace(
        joint,
        histories=histories,
        model=type(call.module).__name__,
        twice_in_pieces=exported.twice_in_pieces,
        unread=exported.unread,
    )


def capture_marked(call: BoundCall, options: CaptureOptions, prepare: Callable[[Exported], None]) -> MarkedStep:
    """Capture one call as `capture_call` does, with marks by which it can be cut, and not yet simplified.

    Args:
        call: the call.
        options: its dynamic sizes and precisions.
        prepare: called with the forward graph before it is traced.

    Raises:
        CaptureError, InputError: as for `capture`.
    """
    marks = StepMarks()
    with _export_once(call, options, changes_parameters=False) as (signature, exported):
        prepare(exported)
        traced, histories = _trace_losses(exported, call.grad, marks=marks)
    joint = describe(traced, exported, signature, defaults_of(call.module))
    return MarkedStep(exported, merge_views(replace(joint, histories=histories)), tuple(marks.makers))


def export_call(call: BoundCall) -> Exported:
    """Return the forward graph of a call that `capture_call` traces.

    Raises:
        CaptureError, InputError: as for `capture`.
    """
    with _export_once(call, CaptureOptions()) as (_, exported):
        return exported


@contextlib.contextmanager
def _export_once(
    call: BoundCall, options: CaptureOptions, *, changes_parameters: bool = True
) -> Iterator[tuple[Hashable, Exported]]:
    """Context in which the forward graph of a call is traced, with the signature of the call and that graph."""
    traced: frozenset[Key] = frozenset()
    while True:
        try:
            with _watched_twin(call, traced) as watch:
                signature = call.signature
                options.progress("export of forward")
                exported = _without_counter_guards(watch, call, options, changes_parameters)
                with watch.mutations.refusing():
                    yield signature, exported
            return
        except HooksInForward as found:
            traced, hooks = traced | found.keys, found
        # Without the twin and the frames of the export, in which objects of the call would live on.
        del watch
        hooks.with_traceback(None).check_leaks()


def _without_counter_guards(
    watch: StateWatch, call: BoundCall, options: CaptureOptions, changes_parameters: bool
) -> Exported:
    """Export as `_export` does, without guards on numbers that `forward` counts with and containers that it fills."""
    first = _export(watch, call, options, changes_parameters)
    # Numbers that forward reads and sets may be counters that only count. Stand-ins for them refuse to be read: if the
    # graph is the same with these, nothing depends on the numbers, and they need no guards. Any code that meets a
    # stand-in may end this second export. It has a twin of its own, since forward has changed the first one.
    if counters := first.state.counters:
        with warnings.catch_warnings(), contextlib.suppress(Exception, HooksInForward), watch.mutations.undone():
            warnings.simplefilter("ignore")
            counting = StateWatch(call.module, fake_mode(), counters, watch.hooks.traced)
            with counting.mutations.restoring():
                second = _export(counting, call, options, changes_parameters)
            if not counting.mutations.depended and _content(second) == _content(first):
                return replace(first, state=second.state)
    return first


def _content(exported: Exported) -> tuple[Any, ...]:
    """Return a value that is equal for equal graphs whose results are put together equally."""
    result = exported.result
    return result.structure, result.leaves, result.names, fingerprint(exported.inputs, (), exported.graph)


def _export(watch: StateWatch, call: BoundCall, options: CaptureOptions, changes_parameters: bool) -> Exported:
    """Return the forward graph of a fake twin, in the precisions of a policy; it may change parameters, or not."""
    dynamic, mp_policy = options.dynamic, options.mp_policy
    module = watch.twin
    fake_call = replace(call, module=module).map_tensors(lambda leaf: fake_like(leaf, watch.mode))
    if dynamic:
        dynamic = without_omitted_arguments(module, dynamic, call.tensors)
    if mp_policy is None:
        exported = export_forward(watch, fake_call, dynamic, call.tensors)
        why = "" if changes_parameters else "the microbatches of a pipeline would all change it"
        exported = assign_changed_parameters(exported, why)
    else:
        lowered = LoweredModule(module, mp_policy)
        exported = export_forward(watch, lowered.inputs(fake_call), dynamic, call.tensors)
        exported = assign_changed_parameters(exported, "in mixed precision, forward has a copy of it")
        exported = lowered.with_casts(exported, fake_call.tensors_of(exported.call))
    check_sizes(exported.graph)
    check_collectives(exported.graph)
    check_shapes(exported.graph)
    if call.grad and options.unread_outputs:
        exported = without_unread_outputs(exported, options.unread_outputs)
    if options.devices is not None:
        large_losses = current_replacements().large_losses
        twice = large_losses(exported.graph_module, options.devices, options.logits_room)
        exported = replace(exported, twice_in_pieces=twice)
    return canonicalize_order(exported)


@contextlib.contextmanager
def _watched_twin(call: BoundCall, traced: Collection[Key]) -> Iterator[StateWatch]:
    """Context of a capture without the caller's modes, in which errors become `CaptureError`s with the user's line."""
    warn_of_untried_release()
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(without_garbage_collection())
            stack.enter_context(outside_modes())
            stack.enter_context(_without_global_hooks())
            stack.enter_context(without_tracebacks())
            stack.enter_context(unwritten_graphs())
            # The caller may be in inference mode, whose tensors autograd does not know.
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(call.grad))
            # A device context sees every call of torch, and costs time: only where the default is another one.
            if torch.get_default_device() != DEVICE:
                stack.enter_context(DEVICE)
            stack.enter_context(autocast_of_gpus())
            stack.enter_context(capturing())
            stack.enter_context(no_accumulation())
            watch = StateWatch(call.module, fake_mode(), traced=traced)
            stack.enter_context(watch.mutations.restoring())
            yield watch
    except AutoshardError:
        raise
    except ModelError as error:
        raise error.error from None
    except Exception as error:
        raise known_error(error) or capture_error(type(call.module).__name__, error) from error


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Context without garbage collection."""
    # Tracing makes many objects that stay: the collection takes a fifth of its time.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _losses(exported: Exported) -> tuple[bool, ...]:
    """Return which outputs to differentiate: floating scalars, or all if there are none."""
    # Beside a loss, models return logits and states, whose gradients no training step asks for.
    values = [node.meta["val"] for node in exported.outputs]
    scalars = tuple(value.ndim == 0 and value.is_floating_point() for value in values)
    return scalars if any(scalars) else tuple(True for _ in values)


def _trace_losses(
    exported: Exported, grad: bool, *, everything: bool = False, marks: StepMarks | None = None
) -> tuple[fx.GraphModule, OutputHistories]:
    """Trace the joint graph, with derivatives of the losses, or of all outputs if there are none, as `_trace` does."""
    all_outputs = tuple(True for _ in exported.outputs)
    differentiated = all_outputs if everything else _losses(exported)
    traced, histories = _trace(exported, differentiated, grad, marks)
    if histories.differentiable and differentiated != all_outputs and not _has_tangents(traced):
        # The scalars do not require a gradient: they are no losses.
        return _trace(exported, all_outputs, grad, marks)
    return traced, histories


def _trace(
    exported: Exported, differentiated: tuple[bool, ...], grad: bool, marks: StepMarks | None
) -> tuple[fx.GraphModule, OutputHistories]:
    """Trace the joint graph; outputs that are not differentiated are detached, assigned buffers follow the outputs.

    Args:
        exported: the forward graph, which gets other outputs.
        differentiated: the outputs that are differentiated.
        grad: False if gradients are off where the module is called.
        marks: marks operators and gradients in the graph.

    Returns:
        The joint graph, and the histories that the outputs have on one device.
    """
    graph = exported.graph
    graph.erase_node(graph.output_node())
    enables = not grad and enables_gradients(exported.graph_module)
    added = [] if marks is None else marks.insert(exported)
    if enables:
        with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
            added.append(set_gradients(graph, False))
    watch = HistoryWatch(exported.result.names)
    added.append(graph.call_function(watch, (list(exported.outputs),)))
    if enables:
        added.append(set_gradients(graph, True))
    results = []
    assigned = [(node, False) for _, node in exported.assigned]
    for node, has_tangent in [*zip(exported.outputs, differentiated, strict=True), *assigned]:
        source = node if has_tangent else graph.call_function(aten.detach.default, (node,))
        # torch treats outputs that alias inputs, parameters or each other in ways of their own: every output is a copy
        # while it is traced. `describe` removes the copies.
        results.append(graph.call_function(aten.clone.default, (source,)))
    if marks is not None:
        added.append(marks.end(exported))
    graph.output(tuple(results))
    exported.graph_module.recompile()
    with keeping_marks(graph), torch.set_grad_enabled(grad or enables):
        traced = trace_joint(exported.graph_module, tuple(item.fake for item in exported.inputs))
    for node in added:
        graph.erase_node(node)  # the graph may be traced again
    return traced, histories_of(exported, watch)


def _has_tangents(traced: fx.GraphModule) -> bool:
    return any(isinstance(node.meta["desc"], TangentAOTInput) for node in traced.graph.find_nodes(op="placeholder"))


@contextlib.contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Context of a capture in which the tables of global hooks are empty."""
    # They run around the root at every call: in the graph, they would run a second time.
    before = [dict(table) for table in GLOBAL_HOOKS]
    for table in GLOBAL_HOOKS:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(GLOBAL_HOOKS, before, strict=True):
            table.update(hooks)


def warn_of_global_hooks() -> bool:
    """Warn if there are global hooks, and return True then."""
    has_hooks = any(GLOBAL_HOOKS)
    if has_hooks:
        warn_caller(
            "there are hooks for all modules (torch.nn.modules.module.register_module_forward_hook and the like): of a "
            "parallelised module they run around the whole, and not around its parts, which are one program. Set hooks "
            "on the parts instead: part.register_forward_hook(...).",
        )
    return has_hooks
