"""Hints: placements that the user pins, by globs over names of parameters and paths of modules.

Regions, in hints and in marks of the model's code, define what is recomputed, kept, or moved to the host; they change
the captured step before it is planned (`regions.py`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import cast, get_args

from torch.distributed.tensor import Placement

from autoshard.capture.marks import Primitive, RegionKind, Saving, TaskGraph, replicate, split
from autoshard.errors import HintError
from autoshard.names import ancestors, matching, suggestion
from autoshard.options.placements import InfeasibleHintError, Pin, Pins, PlacementOption, PlacementValue
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import is_shard, parse_placement, placement_text, split_factor_of

HintValue = PlacementValue | Primitive | Sequence[Primitive] | Saving
_HINTS = PlacementOption(
    "the hint {}",
    "; of a module also autoshard.replicate(n), autoshard.split(n), or several of them for different axes; or "
    "autoshard.recompute(), autoshard.keep() or autoshard.offload()",
)

_PRIMITIVE = re.compile(
    r"(?P<kind>replicate|split)(?:\((?P<devices>[^()=]*?)(?:,?\s*rest\s*=\s*['\"]?(?P<rest>\w+)['\"]?)?\))?"
)
_AXIS = re.compile(r"(?P<axis>\w+)\s*:\s*(?P<placement>.*)")
_SEPARATOR = re.compile(r"\s*,\s*(?![^(]*\))")  # not those of S(0,f=3)


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
            one for each mesh axis, None where the planner may choose; or a mapping from names of axes, where the
            planner chooses for other axes. Primitives, and sequences of them, are ignored; they are for `task_graphs`.
            So are hints for `regions.with_regions`, such as `autoshard.keep()`.
        parameters: name -> global shape.
        aliases: name -> all names of the same (tied) parameter; a hint may use any of them.
        modules: paths of the modules.
        mesh: the mesh axes.

    Returns:
        Name of every parameter with a hint -> a placement for each mesh axis, None where the planner may choose. Dims
        are non-negative; on an axis of size 1 everything is replicated.

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
    placements = {glob: value for glob, value in (hints or {}).items() if not _says_no_placement(value)}
    pinned = _HINTS.resolve(placements, lambda glob: _parameters_of(glob, names, modules), parameters, mesh)
    for name, pins in pinned.items():
        _check_sizes(name, parameters[name], pins, mesh)
    return {name: tuple(pin.placement if pin else None for pin in pins) for name, pins in pinned.items()}


def task_graphs(hints: Mapping[str, HintValue] | None, modules: Collection[str]) -> dict[str, TaskGraph]:
    """Return the task graphs that hints make, by the paths of their modules.

    Args:
        hints: as for `resolve`; those with another value than `autoshard.replicate(n)` or `autoshard.split(n)`, or a
            sequence of such, are ignored.
        modules: paths of the modules.

    Raises:
        HintError: a glob matches no module, or two hints contradict each other.
    """
    globs: dict[str, str] = {}  # the first glob of every module, for errors
    graphs: dict[str, TaskGraph] = {}
    # `resolve` raises the error for hints that are no mapping.
    for glob, value in hints.items() if isinstance(hints, Mapping) else ():
        primitives = _primitives_of(value)
        if not primitives:
            continue
        text, matched = hint_text(primitives), matching(str(glob), modules)
        if not matched:
            raise HintError(
                f"the hint {glob!r}: {text} matches no module. {suggestion(str(glob), set(modules) - {''})}"
            )
        for path in matched:
            before = graphs.setdefault(path, TaskGraph(primitives, path)).primitives
            if before != primitives:
                raise InfeasibleHintError(
                    f"two hints contradict each other on the module {path or '(root)'}: {globs[path]!r} asks for "
                    f"{hint_text(before)}, {glob!r} for {text}. Drop one of them, or let their globs match different "
                    "modules."
                )
            globs.setdefault(path, glob)
    return graphs


def describe(hints: Mapping[str, HintValue] | None) -> dict[str, str]:
    """Return every hint as text, such as `{"layers.*.mlp": "tp: S(0)"}`, for the record in a plan."""
    return {glob: hint_text(value) for glob, value in (hints or {}).items()}


def _primitives_of(value: object) -> tuple[Primitive, ...]:
    """Return the primitives of a hint; none if it is another hint."""
    if isinstance(value, Primitive):
        return (value,)
    values = value if isinstance(value, Sequence) and not isinstance(value, str) else ()
    return tuple(values) if all(isinstance(each, Primitive) for each in values) else ()


def _says_no_placement(value: object) -> bool:
    return isinstance(value, Saving) or bool(_primitives_of(value))


def hint_text(value: HintValue) -> str:
    """Return a value of `hints` as text, such as `"tp: S(0)"`, which `parse_hint` reads."""
    if isinstance(value, Placement):
        return placement_text(value)
    if isinstance(value, Saving):
        return str(value)
    primitives = _primitives_of(value)
    if primitives:
        return ", ".join(map(str, primitives))
    value = cast("Mapping[str, Placement] | Sequence[Placement | None]", value)
    if isinstance(value, Mapping):
        return ", ".join(f"{axis}: {placement_text(placement)}" for axis, placement in value.items())
    return " ".join("-" if placement is None else placement_text(placement) for placement in value)


def parse_hint(text: str) -> HintValue:
    """Return a value of `hints` from text: `hints={"layers.*.up.weight": autoshard.parse_hint("tp:S(0)")}`.

    Args:
        text: `"S(0)"`, for every mesh axis; `"R S(0) -"`, one for each, `-` where the planner chooses; `"tp: S(0)"`,
            by names of axes; or primitives, `"split('tp')"` or `"replicate(4)"`; or `"recompute()"`, `"keep()"` or
            `"offload()"`. Blanks, quotes and empty parentheses may be left out.

    Raises:
        HintError: the text is none of these.
    """
    region = text.strip().removesuffix("()")
    if region in get_args(RegionKind):
        return Saving(cast("RegionKind", region))
    parts = _SEPARATOR.split(text.strip())
    primitives = [_PRIMITIVE.fullmatch(part) for part in parts]
    try:
        if None not in primitives:
            values = tuple(_primitive(match) for match in primitives if match is not None)
            return values[0] if len(values) == 1 else values
        if ":" in text:
            pairs = [_AXIS.fullmatch(part) for part in parts]
            by_axis = {pair["axis"]: parse_placement(pair["placement"]) for pair in pairs if pair is not None}
            if len(by_axis) < len(parts):
                raise ValueError("a part is no axis with a placement, or an axis occurs twice")
            return by_axis
        placements = [None if word == "-" else parse_placement(word) for part in parts for word in part.split()]
        if not placements:
            raise ValueError("there is nothing")
    except ValueError as error:
        raise HintError(
            f"{text!r} is no placement: write S(0) or R for every mesh axis, tp:S(0) for one of them, R,S(0) for each "
            "in turn, or split(tp), replicate(4), recompute(), keep() or offload()."
        ) from error
    if len(placements) == 1 and placements[0] is not None:
        return placements[0]
    return tuple(placements)


def _primitive(match: re.Match[str]) -> Primitive:
    names = [name.strip().strip("'\"") for name in (match["devices"] or "").split(",") if name.strip()]
    devices = int(names[0]) if len(names) == 1 and names[0].isdigit() else names or None
    if match["kind"] == "split":
        return split(devices, rest=match["rest"])  # type: ignore[arg-type]  # it checks the word itself
    if match["rest"] is not None:
        raise ValueError("replicate has no rest")
    return replicate(devices)


def recorded_hints(texts: Mapping[str, str]) -> dict[str, HintValue]:
    """Return the hints in the record of a plan, which also has the primitives of the model's code."""
    return {glob: parse_hint(text) for glob, text in texts.items() if not _PRIMITIVE.fullmatch(glob)}


def _parameters_of(glob: str, names: Mapping[str, str], modules: Collection[str]) -> tuple[str, ...]:
    """Return the first names of the parameters that a glob matches; `names` maps every alias to its first name."""
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
    """Raise a `HintError` if a dim is too small for the axes that shard it, or not divisible where it has to be."""
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
            raise InfeasibleHintError(
                f"{text}: that is less than one element for each of the {parts} parts. Use fewer or other axes."
            )
        strided = any(split_factor_of(pin.placement) > 1 for pin in sharding.values())
        if strided and sum(mesh.axes[axis].size > 1 for axis in sharding) > 1:
            raise InfeasibleHintError(
                f"{text}, as {placements}: torch gathers a dim wrongly that several axes split, one of them strided. "
                "Use plain Shards, or one axis."
            )
        if not _divides(size, {axis: pin.placement for axis, pin in sharding.items()}, mesh):
            raise InfeasibleHintError(
                f"{text}, as {placements}: {size} does not divide evenly. Only a plain Shard over one axis alone may "
                "be uneven."
            )


def _divides(size: int, sharding: Mapping[int, Placement], mesh: MeshShape) -> bool:
    """Return True if axes, each splitting the shards of the previous ones, may shard a dim of this size."""
    # torch pads a plain Shard over a single axis.
    if len(sharding) == 1 and all(split_factor_of(placement) == 1 for placement in sharding.values()):
        return True
    for axis, placement in sharding.items():
        if size % (mesh.axes[axis].size * split_factor_of(placement)):
            return False
        # The next axis splits the shards of this one.
        size //= mesh.axes[axis].size
    return True
