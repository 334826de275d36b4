"""Calls of a parallelised module: which need a new program, their sizes, and global shapes of sharded inputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from autoshard.capture.bound_call import BoundCall
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.joint import Tangents
from autoshard.errors import InputError
from autoshard.options.target import Target
from autoshard.runtime.rank_agreement import HostGroups
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import canonical, dim_of, is_even
from autoshard.specs.spec import Spec, is_shard

PlacementsByName = Mapping[str, tuple[Placement, ...]]
PinsByName = Mapping[str, tuple[Placement | None, ...]]
"""Name of an input -> one placement per axis, None for an axis that the plan decides."""


@dataclass(frozen=True, slots=True)
class NewCall:
    """A call that needs a program.

    Attributes:
        bound: the call, with tensors of global shapes.
        signature: the signature of the call.
        dynamic: True if the sizes that calls may change are dynamic in the program.
        tangents: the outputs that are differentiated, as for `capture`.
        input_pins: placements of inputs in the program; None for the placements of the `DTensor`s.
    """

    bound: BoundCall
    signature: Hashable
    dynamic: bool
    tangents: Tangents = "loss"
    input_pins: PinsByName | None = None


def without_numbers(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
    """Return a meta tensor like a tensor, with its shape or another one."""
    shape = tensor.shape if shape is None else shape
    return torch.empty(shape, dtype=tensor.dtype, device="meta", requires_grad=tensor.requires_grad)


def with_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor without autograd history."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def describe_call(call: BoundCall, split: Mapping[str, Collection[int]] | None = None) -> dict[str, str]:
    """Return texts of everything that must be the same on all ranks in a call of the module.

    Args:
        call: the call.
        split: input path -> the dims whose sizes may differ between ranks.
    """
    split = split or {}
    return {
        "whether gradients are wanted": "yes" if call.grad else "no",
        "whether the module is in training mode": "yes" if call.module.training else "no",
        "the names of the tensors that are passed": ", ".join(call.tensors),
        **{f"the input {name}": _describe_tensor(each, split.get(name, ())) for name, each in call.tensors.items()},
    }


def _describe_tensor(tensor: torch.Tensor, split: Collection[int]) -> str:
    sizes = tuple("any" if dim in split else size for dim, size in enumerate(tensor.shape))
    text = f"{tensor.dtype} {sizes}"
    return f"{text}, a DTensor placed as {tensor.placements}" if isinstance(tensor, DTensor) else text


def pins_of(tensors: Mapping[str, torch.Tensor], device_mesh: DeviceMesh) -> PinsByName:
    """Return the placements of the `DTensor`s that a program takes unchanged: those replicated or evenly sharded."""
    mesh, pins = MeshShape.of(device_mesh), {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor) and tensor.device_mesh == device_mesh:
            spec = Spec.of(*tensor.placements)
            if not spec.partial_axes and is_even(tuple(tensor.shape), spec, mesh):
                pins[name] = canonical(tuple(tensor.shape), spec, mesh).placements
    return pins


_log = logging.getLogger("autoshard")

# The number of signatures whose programs a module keeps; the least recently used is dropped first. Not tuned.
MOST_PROGRAMS = 32

# Two sizes are usual: full batches and the last one, or training and evaluation. A third suggests that more will come.
_ADVISE_AT = 3

# Conventional names of dims in the advice.
_NAMES = {0: "batch", 1: "length"}

CallShapes = Mapping[str, tuple[int, ...]]


class CallSizes:
    """The shapes of a module's calls for which programs were made.

    Args:
        module: the name of its class.
        dynamic: the sizes that calls may change without a new program.
        quiet: True if another rank logs the same.
    """

    def __init__(self, module: str, dynamic: Dynamic, *, quiet: bool) -> None:
        self._module = module
        self._dynamic = dynamic
        self._quiet = quiet
        self._shapes_by_kind: dict[Hashable, list[CallShapes]] = {}
        self._seconds = 0.0
        self._has_advised = False

    def record(self, kind: Hashable, shapes: CallShapes, seconds: float) -> None:
        """Log a new program. For the third of a kind, warn once how one program could serve all.

        Args:
            kind: everything that identifies the call except sizes and plain values.
            shapes: the shapes of its tensors by name.
            seconds: the time it took to make the program.
        """
        calls = self._shapes_by_kind.setdefault(kind, [])
        calls.append(dict(shapes))
        self._seconds += seconds
        if self._quiet:
            return
        text = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        programs = sum(map(len, self._shapes_by_kind.values()))
        _log.info("%s: program %d, for %s, was made in %.1f s", self._module, programs, text or "no tensors", seconds)
        if len(calls) != _ADVISE_AT or self._has_advised:
            return
        self._has_advised = True
        cost = f"{self._module}: {len(calls)} calls that differ in little have programs of their own, made in "
        cost += f"{self._seconds:.1f} s so far. "
        changing = self._changing_dims(calls)
        if changing:
            _log.warning("%sOne serves all with autoshard.parallelize(..., dynamic=%s).", cost, changing)
        elif all(shapes == calls[0] for shapes in calls):
            _log.warning("%sWhat differs is a plain argument, such as a number: pass it as a tensor.", cost)

    def _changing_dims(self, calls: list[CallShapes]) -> dict[str, dict[int, str]]:
        """Return the dims that had several sizes, as `dynamic` takes them; dims with the same sizes have one name."""
        names: dict[tuple[int, ...], str] = {}
        changing: dict[str, dict[int, str]] = {}
        for name, shape in calls[0].items():
            for dim in range(len(shape)):
                sizes = tuple(shapes[name][dim] for shapes in calls)
                if len(set(sizes)) > 1 and dim not in self._dynamic.get(name, {}):
                    default = _NAMES.get(dim, f"size{dim}")
                    free = default if default not in names.values() else f"{default}{len(names)}"
                    changing.setdefault(name, {})[dim] = names.setdefault(sizes, free)
        return changing


# The shape of every input by its path.
Shapes = dict[str, list[int]]
# The shapes of the shards of every input, `[*axes of the mesh, dims]`, by its path.
ShardShapes = Mapping[str, np.ndarray]


def gather_shapes(shapes: Mapping[str, Sequence[int]], hosts: HostGroups) -> ShardShapes:
    """Return the shapes of the shards of all ranks; `shapes` are this rank's, in the same order on all ranks."""
    # One message with the dims of all inputs, split again afterwards.
    table = hosts.gather_numbers([size for shape in shapes.values() for size in shape])
    ends = np.cumsum([len(shape) for shape in shapes.values()])[:-1]
    return dict(zip(shapes, np.split(table, ends, axis=-1), strict=True))


def even_shapes(
    shapes: Mapping[str, Sequence[int]], placements: Mapping[str, Sequence[Placement]], mesh: MeshShape
) -> Shapes:
    """Return the global shapes of inputs whose shards have equal shapes on all ranks."""
    whole = {name: list(shape) for name, shape in shapes.items()}
    for name, shape in whole.items():
        for dim, size in split_dims(placements[name], len(shape), mesh):
            shape[dim] *= size
    return whole


def split_dims(placements: Sequence[Placement], dims: int, mesh: MeshShape) -> list[tuple[int, int]]:
    """Return the dims of a tensor that axes shard, each with the size of the axis."""
    # A 0-d tensor has no rows, whatever the placement of inputs without a plan.
    pairs = zip(placements, mesh.sizes, strict=True) if dims else ()
    return [(dim_of(placement, dims), size) for placement, size in pairs if is_shard(placement)]


def with_global_shapes(call: BoundCall, global_shapes: Callable[[dict[str, tuple[int, ...]]], Shapes]) -> BoundCall:
    """Return a call with this rank's shards replaced by meta tensors of global shapes; `DTensor`s are unchanged.

    Args:
        call: the call.
        global_shapes: returns the global shapes of shards, given their shapes by input path.
    """
    local = {name: tensor for name, tensor in call.tensors.items() if not isinstance(tensor, DTensor)}
    shapes = global_shapes({name: tuple(tensor.shape) for name, tensor in local.items()})
    whole = {name: without_numbers(tensor, shapes[name]) for name, tensor in local.items()}
    return call.with_tensors(whole)


def global_example(call: BoundCall, target: Target, mesh: MeshShape) -> BoundCall:
    """Return an example call with tensors of global shapes: meta tensors if the target's examples are shards.

    Raises:
        HintError: a placement is not valid for an input of that name.
    """
    if target.options.example_inputs == "global":
        return call

    def global_shapes(shapes: dict[str, tuple[int, ...]]) -> Shapes:
        # A rank may have one row of a batch.
        return even_shapes(shapes, target.input_pins(mesh, shapes, may_be_one=True), mesh)

    return with_global_shapes(call, global_shapes)


def whole_shapes(
    tables: ShardShapes,
    placements: Mapping[str, Sequence[Placement]],
    device_mesh: DeviceMesh,
    shares: tuple[int, Sequence[int]] | None = None,
) -> Shapes:
    """Return the global shapes of inputs whose shards have different shapes.

    Args:
        tables: the shapes of the shards of all ranks.
        placements: of every input, one per mesh axis.
        device_mesh: the mesh.
        shares: a mesh axis whose ranks have unequal shares, and the share of each.

    Raises:
        InputError: the lengths are not those of the blocks of `Shard`, or ranks that must have the same tensor have
            different shapes; on every rank.
    """
    whole: Shapes = {}
    for name, shards in tables.items():
        sizes, dims = shards, shards.shape[-1]
        # Axes are joined in reverse order: the last axis was split last.
        for axis in reversed(range(device_mesh.ndim if dims else 0)):
            placement, names = placements[name][axis], (name, _axis_name(device_mesh, axis))
            split = dim_of(placement, dims) if is_shard(placement) else None
            counts = shares[1] if shares and shares[0] == axis else None
            # The sizes along the axis, for every line of ranks; later axes are joined already.
            lines = sizes.reshape(-1, device_mesh.size(axis), dims).tolist()
            joined = [
                [
                    _whole_size(names, dim, lengths, dim == split, counts)
                    for dim, lengths in enumerate(zip(*line, strict=True))
                ]
                for line in lines
            ]
            sizes = np.array(joined)
        whole[name] = sizes.reshape(dims).tolist() if dims else []
    return whole


def local_shares(
    tables: ShardShapes, placements: Mapping[str, Sequence[Placement]], device_mesh: DeviceMesh, axis: int
) -> list[int]:
    """Return the number of rows of every rank along an axis with unequal shares.

    Raises:
        InputError: a rank has different numbers of rows in different inputs, or none; on every rank.
    """
    first, counts = "", list[int]()
    for name, shards in tables.items():
        if not shards.shape[-1] or not is_shard(placements[name][axis]):
            continue
        rows = np.moveaxis(shards[..., dim_of(placements[name][axis], shards.shape[-1])], axis, -1)
        for line in rows.reshape(-1, rows.shape[-1]).tolist():
            first, counts = first or name, counts or line
            if line != counts or min(line) < 1:
                raise InputError(
                    f"the ranks along axis {_axis_name(device_mesh, axis)!r} were given {', '.join(map(str, line))} "
                    f"rows of {name} and {', '.join(map(str, counts))} of {first}: a rank takes equally many "
                    "of all inputs, and one at least."
                )
    return counts


def check_blocks(counts: Sequence[int], axis: str) -> None:
    """Raise an `InputError` unless the counts along an axis are those of the blocks that `Shard` makes."""
    _whole_size(("the batch", axis), 0, counts, True, None)


def _whole_size(
    names: tuple[str, str], dim: int, lengths: Sequence[int], is_split: bool, shares: Sequence[int] | None
) -> int:
    """Return the global size of a dim, from its lengths on the ranks along an axis; names of the input and the axis.

    If the axis splits the dim, the ranks have blocks, or the given shares.
    """
    name, axis = names
    facts = f"the ranks along axis {axis!r} were given {', '.join(map(str, lengths))} elements of dim {dim} of {name}"
    if not is_split:
        if min(lengths) != max(lengths):
            raise InputError(f"{facts}, which they hold alike: pass tensors of one size there.")
        return lengths[0]
    if shares is not None:
        return sum(shares)
    # As in `torch.chunk`: blocks of equal size, except that the last ones are shorter or empty.
    total = sum(lengths)
    part = math.ceil(total / len(lengths))
    expected = [max(0, min(part, total - rank * part)) for rank in range(len(lengths))]
    if list(lengths) != expected:
        raise InputError(
            f"{facts}; the parts that Shard({dim}) makes of {total} are {', '.join(map(str, expected))}: every rank "
            f"takes {part}, and the last ones what is left. Pass such shards, or DTensors, or inputs='global'."
        )
    return total


def _axis_name(device_mesh: DeviceMesh, axis: int) -> str:
    names = device_mesh.mesh_dim_names
    return names[axis] if names else str(axis)
