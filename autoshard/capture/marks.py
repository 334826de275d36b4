"""Marks in `forward` by the user, which a captured graph keeps.

`shard` pins the placements of an activation, by an identity operator. `replicate` and `split` mark parts of `forward`
with their parallelism (Whale 3.1); `recompute`, `keep` and `offload` mark them with how the backward half gets the
values that it reads.
"""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, get_args

import torch
from torch import fx, nn
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autoshard.capture._torch import StridedShard, annotate_nodes, tracing_annotations
from autoshard.errors import HintError
from autoshard.names import ancestors

# A context variable, because other threads may run models during a capture.
CAPTURE: ContextVar[Iterator[int] | None] = ContextVar("autoshard_capture", default=None)
"""Numbers for the task graphs and regions of the current capture; None outside captures."""


def shard(x: torch.Tensor, *placements: Placement) -> torch.Tensor:
    """Pin the placements of one activation: the identity, except while autoshard captures the module.

    Args:
        x: the activation, of any shape.
        placements: one per mesh axis; `dim` counts from the end where it is negative.

    Returns:
        `x` itself; during capture, a tensor equal to it whose placements the planner keeps.

    Raises:
        HintError: (during capture) an argument is not a placement, or its dim is out of range.
    """
    # Outside captures the code also runs without autoshard, where the call must cost nothing.
    if CAPTURE.get() is None:
        return x
    return torch.ops.autoshard.pin(x, pin_text(placements, x.ndim))


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Context in which `shard` adds its operator to the graph, and task graphs mark their operators."""
    token = CAPTURE.set(itertools.count())
    try:
        yield
    finally:
        CAPTURE.reset(token)


def pin_text(placements: tuple[Placement, ...], ndim: int) -> str:
    """Return the text of the placements of a tensor of `ndim` dims, such as `"R;S(0);S(1,f=3);P(sum)"`."""
    # Operator schemas have no type for placements. Text is an argument that all graph passes keep.
    if not placements:
        raise HintError(
            "shard(x) needs one placement per mesh axis, such as shard(x, Shard(0), Replicate()); got none."
        )
    return ";".join(_placement_text(placement, ndim) for placement in placements)


def _placement_text(placement: Placement, ndim: int) -> str:
    if isinstance(placement, (Shard, StridedShard)):
        if not -ndim <= placement.dim < ndim:
            raise HintError(f"shard(x, ...): {placement} is out of range for a tensor of {ndim} dims.")
        factor = placement.split_factor if isinstance(placement, StridedShard) else 1
        return f"S({placement.dim % ndim})" if factor == 1 else f"S({placement.dim % ndim},f={factor})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    if isinstance(placement, Replicate):
        return "R"
    raise HintError(f"shard(x, ...): {placement!r} is no placement; pass Shard(dim), Replicate() or Partial().")


_PLACEMENT = re.compile(r"R|S\((?P<dim>\d+)(?:,f=(?P<factor>\d+))?\)|P\((?P<op>\w+)\)")


def parse_pin(text: str) -> tuple[Placement, ...]:
    """Return the placements that `pin_text` encoded.

    Raises:
        HintError: the text is not from `pin_text`.
    """
    return tuple(_parse_placement(part) for part in text.split(";"))


def _parse_placement(text: str) -> Placement:
    match = _PLACEMENT.fullmatch(text)
    if match is None:
        raise HintError(f"{text!r} is not a placement: expected R, S(dim), S(dim,f=factor) or P(operation).")
    if match["dim"] is None:
        return Partial(match["op"]) if match["op"] else Replicate()
    if match["factor"] is None:
        return Shard(int(match["dim"]))
    return StridedShard(int(match["dim"]), split_factor=int(match["factor"]))


@torch.library.custom_op("autoshard::pin", mutates_args=())
def pin(x: torch.Tensor, placements: str) -> torch.Tensor:
    """Return a copy of `x`; the planner must give it these placements."""
    # A custom operator must not return its operand.
    return x.clone()


@pin.register_fake
def _(x: torch.Tensor, placements: str) -> torch.Tensor:
    return torch.empty_like(x)


def _setup_context(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[torch.Tensor, str], output: torch.Tensor
) -> None:
    ctx.placements = inputs[1]  # type: ignore[attr-defined]


def _backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    # The gradient of a pinned activation has the same placements.
    return torch.ops.autoshard.pin(gradient, ctx.placements), None  # type: ignore[attr-defined]


pin.register_autograd(_backward, setup_context=_setup_context)


Rest = Literal["whole", "batch", "sequence"]

_MARK = "autoshard_task_graph"  # the key, in `node.meta["custom"]`, of the mark of operators under a primitive
_REGIONS = "autoshard_regions"  # the key of their regions of `recompute`, `keep` and `offload`
_DEFAULT = "_autoshard_default_strategy"  # the attribute of a module that `set_default_strategy` makes

# A stack, because a primitive may be entered several times, also inside itself.
_entered: ContextVar[tuple[contextlib.ExitStack, ...]] = ContextVar("autoshard_entered", default=())


@dataclass(frozen=True, slots=True)
class Primitive:
    """The parallelism of a task graph, as `replicate` and `split` return it.

    As a context in `forward`, it marks its operators as one task graph; of nested contexts, the innermost counts.
    Outside a capture, the context does nothing. As a hint, it makes a task graph of each module that the hint matches.

    Attributes:
        kind: `"replicate"` or `"split"`.
        devices: the number of devices, or the mesh axes; None for all.
        rest: for `"split"`: how to split operators that no sharded parameter splits; None if the planner chooses how to
            split all operators.
    """

    kind: Literal["replicate", "split"]
    devices: int | tuple[str, ...] | None = None
    rest: Rest | None = None

    def __str__(self) -> str:
        arguments = map(repr, self.devices) if isinstance(self.devices, tuple) else [str(self.devices or "")]
        rest = [f"rest={self.rest!r}"] if self.rest else []
        return f"{self.kind}({', '.join(filter(None, (*arguments, *rest)))})"

    def __enter__(self) -> Primitive:
        numbers = _numbers()
        if numbers is not None:
            _enter({_MARK: TaskGraph((self,), next(numbers))})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        _leave()


RegionKind = Literal["recompute", "keep", "offload"]
CHECKPOINT = "torch.utils.checkpoint"
"""The origin of a region that is a checkpoint in the model's code."""


@dataclass(frozen=True, slots=True)
class Region:
    """A part of `forward`, from entering a context to leaving it.

    Attributes:
        kind: how the backward half gets values of the region: recomputed, kept, or from the host.
        number: its index in the order in which regions are entered.
        origin: what the user wrote, such as `"autoshard.keep()"`.
    """

    kind: RegionKind
    number: int
    origin: str


# The entered regions, outermost first.
_regions: ContextVar[tuple[Region, ...]] = ContextVar("autoshard_regions", default=())


@dataclass(frozen=True, slots=True)
class Saving:
    """How the backward half gets the values of operators, as returned by `recompute`, `keep` and `offload`.

    As a context in `forward`, it marks its operators as a region. Outside a capture, the context does nothing. As a
    hint, it makes a region of each module that the hint matches.

    Attributes:
        kind: as in `Region`.
        origin: what the user wrote; by default the function that returns it.
    """

    kind: RegionKind
    origin: str = ""

    def __str__(self) -> str:
        return f"{self.kind}()"

    def __enter__(self) -> Saving:
        numbers = _numbers()
        if numbers is not None:
            _regions.set((*_regions.get(), Region(self.kind, next(numbers), self.origin or f"autoshard.{self}")))
            _enter({_REGIONS: _regions.get()})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if _numbers() is not None:
            _regions.set(_regions.get()[:-1])
        _leave()


def recompute() -> Saving:
    """Return the mark of operators to recompute: `with autoshard.recompute():` in `forward`, or a hint.

    Of the values made by these operators, only those used outside the region are kept for the backward half. It
    recomputes all others that it reads just before, with or without a memory limit, by the operators that this needs,
    with the same random numbers. As a hint, the mark applies to modules, each of which is a region: `hints={"layers.*":
    autoshard.recompute()}`. Every call of `torch.utils.checkpoint` in the model is a region, too. Outside a capture,
    the context does nothing.
    """
    return Saving("recompute")


def keep() -> Saving:
    """Return the mark of operators whose values are kept: `with autoshard.keep():` in `forward`, or a hint.

    Values made by these operators and read by the backward half remain on the device: they are neither recomputed nor
    moved to the host, whatever the memory limit. Views do not count as values. As a hint, the mark applies to modules
    and all their submodules: `hints={"layers.*.attention": autoshard.keep()}`. Outside a capture, the context does
    nothing.
    """
    return Saving("keep")


def offload() -> Saving:
    """Return the mark of tensors to move to the host: `with autoshard.offload():` in `forward`, or a hint.

    Tensors made by these operators and read by the backward half are copied to the host once they exist, and back
    before they are read; in between, the device does not hold them. Tensors 64 times smaller than the largest of them
    stay. As a hint, the mark applies to modules and all their submodules: `hints={"layers.*": autoshard.offload()}`.
    Outside a capture, the context does nothing.
    """
    return Saving("offload")


def marked_regions(node: fx.Node) -> tuple[Region, ...]:
    """Return the regions in which a node was traced, outermost first."""
    regions: tuple[Region, ...] = (node.meta.get("custom") or {}).get(_REGIONS, ())
    return regions


def marks_by_order(node: fx.Node, places: dict[Region, int]) -> dict[str, object]:
    """Return all marks of a node, with regions numbered by `places`, to which new regions are added."""
    marks = dict(node.meta.get("custom") or {})
    regions = marks.pop(_REGIONS, ())
    return marks | {_REGIONS: tuple((each.origin, places.setdefault(each, len(places))) for each in regions)}


def add_region(node: fx.Node, region: Region) -> None:
    """Mark an operator of an exported graph with the region of a hint, outside those of the model's code."""
    node.meta["custom"] = {**(node.meta.get("custom") or {}), _REGIONS: (region, *marked_regions(node))}


def _numbers() -> Iterator[int] | None:
    """Return the numbers for regions and task graphs; None outside captures."""
    # Dynamo, which traces the code of branches and loops, would otherwise have to trace what follows.
    return None if torch.compiler.is_dynamo_compiling() else CAPTURE.get()


def _enter(marks: Mapping[str, object]) -> None:
    """Mark the operators captured from now on, until `_leave`."""
    stack = contextlib.ExitStack()
    stack.enter_context(annotate_nodes(marks))
    _entered.set((*_entered.get(), stack))


def _leave() -> None:
    if _numbers() is not None:
        *others, stack = _entered.get()
        _entered.set(tuple(others))
        stack.close()


@dataclass(frozen=True, slots=True)
class TaskGraph:
    """A part of a model with one parallelism.

    Attributes:
        primitives: the parallelism; several primitives are for different mesh axes.
        place: for a context in `forward`, its index in the order in which contexts are entered; for a default or a
            hint, the path of its module.
    """

    primitives: tuple[Primitive, ...]
    place: int | str


Devices = int | str | Sequence[str] | None


def replicate(devices: Devices = None) -> Primitive:
    """Return data parallelism for operators in its context: `with autoshard.replicate(4):` in `forward`.

    Tensors with a batch dim (the first dim of the inputs, and dims derived from it) are sharded by it, so that each
    device computes its part of the batch; parameters that no other operator uses are whole on each device. On a mesh
    with a pipeline axis, several such contexts (or those of `split`) with numbers of devices are the pipeline's stages.

    Args:
        devices: a number: the devices of the first mesh axis of that size, or of several axes with that product; or the
            name of an axis, or names of several. None: all devices. On other axes the planner decides.

    Returns:
        The primitive, for a `with` statement in `forward`, or for `set_default_strategy`.

    Raises:
        HintError: `devices` is not valid; or, when the model is planned, the mesh has no such axes.

    Source: Whale 3.1.2, "Parallel Primitives".
    """
    return Primitive("replicate", _check_devices("replicate", devices))


def split(devices: Devices = None, *, rest: Rest | None = None) -> Primitive:
    """Return tensor parallelism for operators in its context: `with autoshard.split(4):` in `forward`.

    No operator is sharded by the batch on these devices. The operators with the most compute are split by dims of
    parameters if possible: rows or columns of a weight, heads, experts, classes. The planner chooses.

    With `rest`, the planner does not choose. Hints shard parameters on these axes, and operators are split along the
    dims of these shards, propagated through the graph: for instance from the rows of a query's weight to heads, and to
    the columns of the weight after attention. The other operators are split as `rest` says. With the weights of
    Megatron-LM, `split("tp", rest="whole")` is its tensor parallelism, and `rest="sequence"` adds its sequence
    parallelism; with sharded experts, `rest="batch"` is expert parallelism.

    Args:
        devices: as for `replicate`, but if several axes have that size, the last is used.
        rest: other operators are not split (`"whole"`), split by the batch (`"batch"`), or by dim 1 of the inputs that
            have the batch and two or three dims (`"sequence"`).

    Returns, Raises, Source: as for `replicate`. With `rest`, a `HintError` is also raised if hints shard no parameter.
    """
    if rest is not None and rest not in get_args(Rest):
        raise HintError(f"autoshard.split(rest={rest!r}): choose {', '.join(map(repr, get_args(Rest)))}, or None.")
    return Primitive("split", _check_devices("split", devices), rest)


def set_default_strategy(module: nn.Module, strategy: Primitive | None) -> None:
    """Set the parallelism of a module's operators, submodules included, that no primitive covers.

    It is a property of the module that `parallelize` and `plan` read: of nested modules the innermost default applies,
    and a primitive in `forward` overrides any.

    Args:
        module: the model, or a part of it, before it is planned.
        strategy: `autoshard.replicate(n)`, `autoshard.split(n)`, or None for no default.

    Raises:
        HintError: the strategy is none of these.

    Source: Whale 5.3.2, Example 5. There the default belongs to the process; here to a module, so that it does not
    affect other models.
    """
    if not isinstance(module, nn.Module):
        raise HintError(
            f"set_default_strategy({module!r}, ...): the default is a module's: "
            "set_default_strategy(model, autoshard.replicate(n))."
        )
    if strategy is not None and not isinstance(strategy, Primitive):
        raise HintError(
            f"set_default_strategy(module, {strategy!r}): choose autoshard.replicate(n), autoshard.split(n), or None."
        )
    # In `__dict__`, which is copied with the module, but is not in its `state_dict`.
    if strategy is None:
        module.__dict__.pop(_DEFAULT, None)
    else:
        module.__dict__[_DEFAULT] = strategy


def _check_devices(kind: str, devices: object) -> int | tuple[str, ...] | None:
    # In Python True is an int, but it is not a number of devices.
    if devices is None or (isinstance(devices, int) and not isinstance(devices, bool) and devices > 0):
        return devices
    names = (devices,) if isinstance(devices, str) else devices
    if isinstance(names, Sequence) and names and all(isinstance(name, str) for name in names):
        return tuple(dict.fromkeys(names))
    raise HintError(
        f"autoshard.{kind}({devices!r}): give a number of devices, such as {kind}(4), or names of mesh axes, such as "
        f'{kind}("tp").'
    )


def keeping_marks(graph: fx.Graph) -> contextlib.AbstractContextManager[None]:
    """Context in which nodes traced from a graph, derivatives included, inherit the marks of its nodes."""
    # Only if there is a mark: keeping annotations of all nodes takes time.
    is_marked = any(_mark_of(node) is not None or marked_regions(node) for node in graph.nodes)
    return tracing_annotations() if is_marked else contextlib.nullcontext()


def defaults_of(module: nn.Module) -> dict[str, TaskGraph]:
    """Return the task graphs of defaults, by the paths of the modules that have them."""
    defaults = ((path, part.__dict__.get(_DEFAULT)) for path, part in module.named_modules(remove_duplicate=False))
    return {path: TaskGraph((default,), path) for path, default in defaults if default is not None}


def mark_defaults(graph: fx.Graph, defaults: Mapping[str, TaskGraph]) -> None:
    """Mark the operators of an exported forward graph that no primitive in `forward` covers with their defaults.

    So a part that is cut from the graph keeps its task graphs, although its modules are others.

    Args:
        graph: an exported graph, with the modules of every node.
        defaults: task graphs by paths of modules; the innermost applies.
    """
    # Most models have no defaults, and graphs are long.
    for node in graph.nodes if defaults else ():
        if node.op == "call_function" and _mark_of(node) is None:
            stack = node.meta.get("nn_module_stack") or {"": ("",)}
            default = _default_of(next(reversed(stack.values()))[0], defaults)
            if default is not None:
                node.meta["custom"] = {**(node.meta.get("custom") or {}), _MARK: default}


def task_graphs_with_counts(graph: fx.Graph) -> dict[str, TaskGraph]:
    """Return the task graphs, by node name, of contexts in `forward` that request a number of devices.

    On a mesh with a pipeline axis, this is the number of a stage's devices, if several such contexts follow each other.
    """
    marks = ((node.name, _mark_of(node)) for node in graph.nodes)
    return {
        name: mark
        for name, mark in marks
        if mark is not None and isinstance(mark.place, int) and isinstance(mark.primitives[0].devices, int)
    }


def assign_task_graphs(graph: fx.Graph, defaults: Mapping[str, TaskGraph]) -> None:
    """Set `meta["task_graph"]` of every operator of a step; all have a module path.

    Args:
        graph: the graph of a step.
        defaults: task graphs of unmarked operators, by paths of modules; the innermost applies.
    """
    for node in graph.nodes:
        if node.op == "call_function":
            node.meta["task_graph"] = _task_graph_of(node, defaults)


def _task_graph_of(node: fx.Node, defaults: Mapping[str, TaskGraph]) -> TaskGraph | None:
    marked = _mark_of(node)
    if marked is not None:
        return marked
    if node.meta.get("is_gradient_acc"):  # a sum of gradients is in the task graph of both terms, or in none
        added = {source.meta.get("task_graph") for source in node.all_input_nodes}
        return added.pop() if len(added) == 1 else None
    return _default_of(node.meta.get("module_path", ""), defaults)


def _default_of(path: str, defaults: Mapping[str, TaskGraph]) -> TaskGraph | None:
    return next((defaults[each] for each in (path, *ancestors(path), "") if each in defaults), None)


def _mark_of(node: fx.Node) -> TaskGraph | None:
    mark = (node.meta.get("custom") or {}).get(_MARK)
    assert mark is None or isinstance(mark, TaskGraph)
    return mark
