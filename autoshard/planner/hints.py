"""Hints: placements that the user pins, by globs over names of parameters and paths of modules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import prod

from torch.distributed.tensor import Placement

from autoshard.capture.marks import Primitive, TaskGraph
from autoshard.errors import HintError
from autoshard.names import ancestors, matching, suggestion
from autoshard.options.placements import Pin, Pins, PlacementOption, PlacementValue
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import is_shard, placement_text, split_factor_of

HintValue = PlacementValue | Primitive
_HINTS = PlacementOption("the hint {}", "; of a module also autoshard.replicate(n) or autoshard.split(n)")


def resolve(
    hints: Mapping[str, HintValue] | None,
    parameters: Mapping[str, Sequence[int]],
    aliases: Mapping[str, Sequence[str]],
    modules: Collection[str],
    mesh: MeshShape,
) -> dict[str, Pins]:
    """Return the placements that hints pin.

    Args:
        hints: glob -> placements. A glob is matched against parameter names and module paths (`*` matches dots too); a
            module stands for every parameter below it. Placements are one placement, for every mesh axis; a sequence of
            one for each mesh axis, None where the planner may choose; or a mapping from names of axes, which leaves
            other axes to the planner. Primitives are ignored; they are for `task_graphs`.
        parameters: name -> global shape.
        aliases: name -> every name of the same (tied) parameter; a hint may use any of them.
        modules: paths of the modules.
        mesh: the mesh axes.

    Returns:
        Name of every parameter that a hint reaches -> a placement for each mesh axis, None where the planner may
        choose. Dims are counted from the front; on an axis of size 1 everything is replicated.

    Raises:
        HintError: a glob matches nothing; a value is none of the above, or is `Partial`; an axis does not exist; a dim
            is out of range, or too small for the axes that shard it; or two hints contradict each other.
    """
    if hints is not None and not isinstance(hints, Mapping):
        raise HintError(
            f"hints={hints!r}: hints are a mapping from globs over parameter and module names to placements, such as "
            f"{{'layers.*.up.weight': {{{mesh.names[-1]!r}: Shard(0)}}}}."
        )
    # A tied parameter is pinned once, under its first name.
    names = {alias: name for name in parameters for alias in (name, *aliases.get(name, ()))}
    placements = {glob: value for glob, value in (hints or {}).items() if not isinstance(value, Primitive)}
    pinned = _HINTS.resolve(placements, lambda glob: _parameters_of(glob, names, modules), parameters, mesh)
    for name, pins in pinned.items():
        _check_sizes(name, parameters[name], pins, mesh)
    return {name: tuple(pin.placement if pin else None for pin in pins) for name, pins in pinned.items()}


def task_graphs(hints: Mapping[str, HintValue] | None, modules: Collection[str]) -> dict[str, TaskGraph]:
    """Return the task graphs that hints make, by the paths of their modules.

    Args:
        hints: as for `resolve`; those with another value than `autoshard.replicate(n)` or `autoshard.split(n)` are
            ignored.
        modules: paths of the modules.

    Raises:
        HintError: a glob matches no module, or two hints contradict each other.
    """
    globs: dict[str, str] = {}  # the first glob of every module, for errors
    graphs: dict[str, TaskGraph] = {}
    # `resolve` raises the error of hints that are no mapping.
    for glob, value in hints.items() if isinstance(hints, Mapping) else ():
        if not isinstance(value, Primitive):
            continue
        matched = matching(str(glob), modules)
        if not matched:
            raise HintError(
                f"the hint {glob!r}: {value} matches no module. {suggestion(str(glob), set(modules) - {''})}"
            )
        for path in matched:
            before = graphs.setdefault(path, TaskGraph(value, path)).primitive
            if before != value:
                raise HintError(
                    f"two hints contradict each other on the module {path or '(root)'}: {globs[path]!r} asks for "
                    f"{before}, {glob!r} for {value}. Drop one of them, or let their globs match different modules."
                )
            globs.setdefault(path, glob)
    return graphs


def describe(hints: Mapping[str, HintValue] | None) -> dict[str, str]:
    """Return every hint as text, such as `{"layers.*.mlp": "tp: S(0)"}`, for the record in a plan."""
    return {glob: _value_text(value) for glob, value in (hints or {}).items()}


def _value_text(value: HintValue) -> str:
    if isinstance(value, Placement):
        return placement_text(value)
    if isinstance(value, Primitive):
        return str(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{axis}: {placement_text(placement)}" for axis, placement in value.items())
    return " ".join("-" if placement is None else placement_text(placement) for placement in value)


def _parameters_of(glob: str, names: Mapping[str, str], modules: Collection[str]) -> tuple[str, ...]:
    """Return the parameters that a glob reaches, by their first names; `names` maps every alias to its first name."""
    if not isinstance(glob, str):
        raise HintError(f"the hint {glob!r} is not a text: hints are keyed by globs over parameter and module names.")
    # The root module, whose path is empty, would match a glob such as `*` for all parameters.
    matched_modules = set(matching(glob, (module for module in modules if module)))
    reached = [
        first
        for alias, first in names.items()
        if matching(glob, (alias,)) or not matched_modules.isdisjoint(ancestors(alias))
    ]
    if not reached and matched_modules:
        raise HintError(
            f"the hint {glob!r} matches the module {min(matched_modules)}, which has no parameters to place."
        )
    if not reached:
        known = {*names, *modules} - {""}
        raise HintError(f"the hint {glob!r} matches no parameter and no module. {suggestion(glob, known)}")
    # A glob may match several names of one tied parameter.
    return tuple(dict.fromkeys(reached))


def _check_sizes(name: str, shape: Sequence[int], pins: Sequence[Pin | None], mesh: MeshShape) -> None:
    """Raise a `HintError` if a dim is too small for the axes that shard it, or must divide evenly and does not."""
    for dim, size in enumerate(shape):
        sharding = {
            axis: pin
            for axis, pin in enumerate(pins)
            if pin is not None and is_shard(pin.placement) and pin.placement.dim == dim  # type: ignore[attr-defined]
        }
        if not sharding:
            continue
        parts = prod(mesh.axes[axis].size for axis in sharding)
        over = " and ".join(f"{mesh.axes[axis].name}={mesh.axes[axis].size}" for axis in sharding)
        globs = " and ".join(dict.fromkeys(repr(pin.glob) for pin in sharding.values()))
        text = f"the hint {globs} shards dim {dim} of {name}, of size {size}, over {over}"
        placements = ", ".join(placement_text(pin.placement) for pin in sharding.values())
        if size < parts:
            raise HintError(
                f"{text}: that is less than one element for each of the {parts} parts. Use fewer or other axes."
            )
        strided = any(split_factor_of(pin.placement) > 1 for pin in sharding.values())
        if strided and sum(mesh.axes[axis].size > 1 for axis in sharding) > 1:
            raise HintError(
                f"{text}, as {placements}: torch gathers a dim wrongly that several axes split, one of them strided. "
                "Use plain Shards, or one axis."
            )
        if not _divides(size, {axis: pin.placement for axis, pin in sharding.items()}, mesh):
            raise HintError(
                f"{text}, as {placements}: {size} does not divide evenly. Only a plain Shard over one axis alone may "
                "be uneven."
            )


def _divides(size: int, sharding: Mapping[int, Placement], mesh: MeshShape) -> bool:
    """Return True if axes, of which each splits the shards of the ones before it, may shard a dim of this size."""
    # torch pads a plain Shard over a single axis.
    if len(sharding) == 1 and all(split_factor_of(placement) == 1 for placement in sharding.values()):
        return True
    for axis, placement in sharding.items():
        if size % (mesh.axes[axis].size * split_factor_of(placement)):
            return False
        # The next axis splits the shards of this one.
        size //= mesh.axes[axis].size
    return True
