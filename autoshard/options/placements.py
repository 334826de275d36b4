"""Placements that a user gives by name, for parameters (hints), inputs and outputs, and their parser.

Names are globs. A value is one placement for all mesh axes; a sequence with one for each mesh axis; or a mapping from
axis names. None in a sequence, and axes missing in a mapping, remain open.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Partial, Placement, Replicate

from autoshard.errors import HintError
from autoshard.names import matching_paths, suggestion
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import is_shard, placement_text, shard_placement, split_factor_of

PlacementValue = Placement | Sequence[Placement | None] | Mapping[str, Placement]
Pins = tuple[Placement | None, ...]
"""A placement per mesh axis; None if it is open."""
Shapes = Mapping[str, Sequence[int]]


class InfeasibleHintError(HintError):
    """The option names something that exists, but no plan on this mesh can satisfy it."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A placement, and the glob that requested it."""

    glob: str
    placement: Placement


@dataclass(frozen=True, slots=True)
class PlacementOption:
    """The option with the placements, as named in errors.

    Attributes:
        text: the start of an error, with `{}` for the glob, such as `"the hint {}"`.
        others: what a value may be other than placements, such as `"; or autoshard.split(n)"`.
    """

    text: str
    others: str = ""

    def subject(self, glob: object) -> str:
        """Return the start of an error about the value of a glob."""
        return self.text.format(repr(glob))

    def per_axis(self, glob: str, value: object, mesh: MeshShape) -> Pins:
        """Return a value as one placement, or None, per mesh axis.

        Raises:
            HintError: the value is not a placement, or is `Partial`; the number of placements is not that of axes; or
                an axis does not exist.
        """
        subject = self.subject(glob)
        if isinstance(value, Placement):
            return (self._check_placement(glob, value),) * mesh.ndim
        if isinstance(value, Mapping):
            unknown = [axis for axis in value if axis not in mesh.names]
            if unknown:
                raise HintError(
                    f"{subject}: {value!r} names the mesh axis {unknown[0]!r}; the axes of this mesh are {mesh}."
                )
            return tuple(self._check_placement(glob, value[name]) if name in value else None for name in mesh.names)
        if isinstance(value, Sequence) and not isinstance(value, str):
            if len(value) != mesh.ndim:
                raise HintError(
                    f"{subject}: {value!r} has {len(value)} placements for the {mesh.ndim} axes of the mesh ({mesh}). "
                    f"Give one for each, None to leave an axis open, or name axes: {{{mesh.names[-1]!r}: Shard(0)}}."
                )
            return tuple(None if placement is None else self._check_placement(glob, placement) for placement in value)
        raise self._not_a_placement(glob, value)

    def _check_placement(self, glob: str, value: object) -> Placement:
        """Return a placement; raise a `HintError` if a tensor outside the step cannot have it."""
        if isinstance(value, Partial):
            raise HintError(
                f"{self.subject(glob)} asks for {value!r}: a tensor outside the step cannot be Partial, since it is a "
                "value and not a sum still to be made. Use Replicate() or Shard(dim)."
            )
        if not isinstance(value, Placement) or not (isinstance(value, Replicate) or is_shard(value)):
            raise self._not_a_placement(glob, value)
        return value

    def _not_a_placement(self, glob: str, value: object) -> HintError:
        return HintError(
            f"{self.subject(glob)}: {value!r} pins no placement: give Replicate() or Shard(dim), one for every mesh "
            f"axis, a sequence of one per axis, or a mapping from names of mesh axes{self.others}."
        )

    def resolve(
        self,
        requested: Mapping[str, object],
        names_of: Callable[[str], Iterable[str]],
        shapes: Shapes,
        mesh: MeshShape,
    ) -> dict[str, list[Pin | None]]:
        """Return the pins of every tensor that a glob matches, one or None per mesh axis.

        Dims are counted from the front, and everything is replicated on an axis of size 1.

        Args:
            requested: glob -> value.
            names_of: returns the names of the tensors that a glob matches.
            shapes: name -> global shape.
            mesh: the mesh axes.

        Raises:
            HintError: a value is not valid, a dim is out of range, or two globs contradict each other.
        """
        pinned: dict[str, list[Pin | None]] = {}
        for glob, value in requested.items():
            placements = self.per_axis(glob, value, mesh)
            for name in names_of(glob):
                pins = pinned.setdefault(name, [None] * mesh.ndim)
                for axis, placement in enumerate(placements):
                    if placement is not None:
                        pin = Pin(glob, self._normalize(glob, placement, name, shapes[name], mesh.axes[axis].size))
                        pins[axis] = self._merge(pins[axis], pin, name, mesh.axes[axis].name)
        return pinned

    def _normalize(self, glob: str, placement: Placement, name: str, shape: Sequence[int], size: int) -> Placement:
        """Return a placement with its dim counted from the front; replicated on an axis of size 1."""
        if not is_shard(placement):
            return placement
        dim: int = placement.dim  # type: ignore[attr-defined]
        if not -len(shape) <= dim < len(shape):
            raise InfeasibleHintError(
                f"{self.subject(glob)} shards dim {dim} of {name}, which has {len(shape)} dims (shape {tuple(shape)}). "
                f"Choose a dim below {len(shape)}, or let the glob match fewer tensors."
            )
        # An axis of size 1 shards nothing; plans always write this as replicated.
        return Replicate() if size == 1 else shard_placement(dim % len(shape), split_factor_of(placement))

    def _merge(self, before: Pin | None, pin: Pin, name: str, axis: str) -> Pin:
        """Return the pin of an axis; raise a `HintError` if two globs request different ones."""
        if before is not None and before.placement != pin.placement:
            raise InfeasibleHintError(
                f"{self.subject(before.glob)} and {self.subject(pin.glob)} contradict each other on {name}, mesh axis "
                f"{axis!r}: {before.glob!r} asks for {placement_text(before.placement)}, {pin.glob!r} for "
                f"{placement_text(pin.placement)}. Drop one of them, or let their globs match different tensors."
            )
        # Equal pins agree; keep the first one, for error messages.
        return before or pin


INPUTS = PlacementOption("input_placements[{}]")
OUTPUTS = PlacementOption("output_placements[{}]")


def fill(pins: Sequence[Pin | None], default: Sequence[Placement]) -> tuple[Placement, ...]:
    """Return the placements of pins, with default ones on open axes."""
    return tuple(pin.placement if pin else other for pin, other in zip(pins, default, strict=True))


def names_reached(glob: str, names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of inputs or outputs that a glob matches; brackets are literal, as in `output[0]`."""
    if not isinstance(glob, str):
        raise HintError(f"{glob!r} is not a text: placements are keyed by globs over names.")
    return matching_paths(glob, names)


def unknown_name_error(kind: str, glob: str, known: Collection[str]) -> HintError:
    """Return the error about an unknown name of an input or output of a call."""
    names = ", ".join(known) or "none"
    return HintError(f"there is no {kind} {glob!r}; the {kind}s are {names}. {suggestion(glob, known)}")
