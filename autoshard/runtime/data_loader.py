"""Data loaders that yield each rank's part of the batches of a loader written for one device."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from autoshard.errors import InputError
from autoshard.runtime.rank_agreement import HostGroups, Seeds, from_first_rank, is_alone
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import part_of_rows


def _mix(*numbers: int) -> int:
    """Return a seed that depends on all bits of some numbers."""
    # Torch's CPU generator uses only the lower 32 bits of a seed.
    return int.from_bytes(hashlib.blake2b(repr(numbers).encode(), digest_size=7).digest(), "big")


@dataclass(frozen=True, slots=True)
class BatchPart:
    """This rank's part of a batch.

    Attributes:
        count: the number of parts.
        index: the index of this rank's part.
        nested: True if several axes shard a batch; each must divide it.
    """

    count: int
    index: int
    nested: bool = False

    @staticmethod
    def of(device_mesh: DeviceMesh, data_axes: Sequence[str]) -> BatchPart:
        """Return this rank's part if ranks along the data axes have different rows."""
        coordinate = device_mesh.get_coordinate()
        if coordinate is None:
            raise InputError("this rank is not on the mesh of the model, and has no part of its batches.")
        shape = MeshShape.of(device_mesh)
        long = [axis for axis in shape.axes if axis.name in data_axes and axis.size > 1]
        return BatchPart(*part_of_rows(shape, data_axes, coordinate), nested=len(long) > 1)

    def rows(self, length: int) -> slice:
        """Return the rows of a batch for this rank, as `Shard(0)` splits them; the last parts may be empty."""
        size = math.ceil(length / self.count)
        if self.nested and length % self.count:
            raise InputError(
                f"a batch of {length} rows is split over several data axes, which cut it into {self.count} equal "
                "parts: choose a batch size that they divide, and drop_last=True."
            )
        return slice(self.index * size, (self.index + 1) * size)


class _RandomState:
    """A second state of torch's CPU generator, which a `with` activates."""

    def __init__(self, seed: int) -> None:
        self._state = torch.Generator().manual_seed(seed).get_state()

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self._state)

    def __exit__(self, *error: object) -> None:
        self._state = torch.get_rng_state()
        torch.set_rng_state(self._outside)


class _AgreedBatches:
    """A batch sampler that draws the same batches of indices on all ranks.

    Attributes:
        seed: the seed of the next iteration, independent of the ranks' random state in torch.
        skip: the number of batches that the next iteration skips.
        generator: the sampler's generator, with the state of the first rank's; None if the sampler has none.
        first_state: its state before the last iteration.
    """

    def __init__(self, batches: Any, device_mesh: DeviceMesh, hosts: HostGroups) -> None:
        self.batches = batches
        self.seed = self.skip = 0
        self._device_mesh = device_mesh
        self._hosts = hosts
        generator = getattr(getattr(batches, "sampler", batches), "generator", None)
        self.generator = generator if isinstance(generator, torch.Generator) else None
        self.first_state: Tensor | None = None
        if self.generator is not None:
            state = bytes(self.generator.get_state().tolist()).hex()
            first = bytes.fromhex(from_first_rank(device_mesh, lambda: state))
            self.generator.set_state(torch.tensor(list(first), dtype=torch.uint8))

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[Any]]:
        state, skip = _RandomState(self.seed), self.skip
        self.first_state = None if self.generator is None else self.generator.get_state()
        with state:
            iterator = iter(self.batches)
        for number in itertools.count():
            with state:
                batch = next(iterator, None)
            if number == 0:
                self._compare(batch)
            if batch is None:
                return
            if number >= skip:
                yield batch

    def _compare(self, first: list[Any] | None) -> None:
        """Raise an `InputError` on every rank if the first batches, or the numbers of batches, differ between ranks."""
        length = len(self.batches) if hasattr(self.batches, "__len__") else None
        if not is_alone(self._device_mesh) and any(self._hosts.differ(repr((first, length)))):
            raise InputError(
                "the ranks draw other batches from their loaders, and each is to take its part of the same batch: give "
                "shard_dataloader the loader of one device, without a DistributedSampler, and with samplers that draw "
                "by torch's random numbers or by one seed."
            )


class _Fetched(NamedTuple):
    """Rows of a batch for a rank, or a single placeholder row if it has none."""

    rows: list[Any]
    is_empty: bool


def _take_part(rows: Sequence[Any], part: BatchPart) -> tuple[Sequence[Any], bool]:
    """Return this rank's rows, or the first row and True if it has none."""
    own = rows[part.rows(len(rows))]
    return (own, False) if len(own) else (rows[:1], True)


class _PartialDataset:
    """A dataset from which a rank reads only its part of every batch."""

    def __init__(self, dataset: Any, part: BatchPart) -> None:
        self._dataset, self._part = dataset, part

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[index]

    def __getitems__(self, indices: list[Any]) -> _Fetched:
        own, is_empty = _take_part(indices, self._part)
        fetch = getattr(self._dataset, "__getitems__", None)
        return _Fetched(fetch(own) if fetch is not None else [self._dataset[index] for index in own], is_empty)

    def __getattr__(self, name: str) -> Any:
        # For user code in workers. While an object is unpickled it has no attributes yet.
        if name.startswith("__") or "_dataset" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._dataset, name)


class _PartialCollate:
    """A collate function for this rank's rows, of which there may be none."""

    def __init__(self, collate: Callable[[Any], Any], part: BatchPart) -> None:
        self._collate, self._part = collate, part

    def __call__(self, rows: Any) -> Any:
        # An iterable dataset has read the rows of all ranks.
        fetched = rows if isinstance(rows, _Fetched) else _Fetched(*_take_part(rows, self._part))  # type: ignore[arg-type]
        batch = self._collate(fetched.rows)
        if not fetched.is_empty:
            return batch
        # A library's mapping type may not be a pytree.
        return pytree.tree_map_only(Tensor, _without_row, dict(batch) if isinstance(batch, Mapping) else batch)


def _without_row(tensor: Tensor) -> Tensor:
    return tensor[:0] if tensor.ndim and len(tensor) == 1 else tensor


class ShardedDataLoader:
    """A loader of this rank's part of every batch; made by `autoshard.shard_dataloader`.

    Batches come in the same order on all ranks. Torch's random numbers that the data set draws, in workers and in this
    process, are equal on ranks with the same rows, and different in every epoch.

    Args:
        loader: the original loader, with global batches.
        device_mesh: the mesh; all its ranks create the loader and iterate it together.
        part: this rank's part of a batch.
        hosts: process groups of the mesh for CPU tensors; created if None.

    Attributes:
        loader: the loader that yields the parts.
        epoch: the number of the current epoch, or of the next one at its end.
        batches: the number of its batches that were yielded.

    Raises:
        InputError: the loader makes no batches, or its class cannot be constructed again.
    """

    def __init__(
        self, loader: DataLoader[Any], device_mesh: DeviceMesh, part: BatchPart, hosts: HostGroups | None = None
    ) -> None:
        if not isinstance(loader, DataLoader):
            raise InputError(f"shard_dataloader takes a torch.utils.data.DataLoader, got {type(loader).__name__}.")
        if loader.batch_size is None and loader.batch_sampler is None and part.count > 1:
            raise InputError(
                "shard_dataloader cuts the batches that a DataLoader makes, and this one has batch_size=None: its data "
                "set makes them. Let the data set yield rows, and pass batch_size."
            )
        hosts = HostGroups(device_mesh) if hosts is None else hosts
        self.epoch = self.batches = 0
        self._is_resumed = False
        self._part = part
        self._seed = int(Seeds(device_mesh, hosts).draw())
        self._generator = torch.Generator() if loader.generator is None else None
        self._agreed: _AgreedBatches | None = None
        changes: dict[str, Any] = {"generator": self._generator or loader.generator}
        if loader.batch_sampler is not None:
            changes["collate_fn"] = _PartialCollate(loader.collate_fn, part)
            if not isinstance(loader.dataset, IterableDataset):
                changes["dataset"] = _PartialDataset(loader.dataset, part)
                self._agreed = changes["batch_sampler"] = _AgreedBatches(loader.batch_sampler, device_mesh, hosts)
        self._source = loader
        self.loader = _rebuild(loader, changes)

    def __len__(self) -> int:
        return len(self._source)

    def set_epoch(self, epoch: int) -> None:
        """Select the epoch, and its order, of the next iteration; without a call, epochs are counted.

        A loaded state continues its own epoch.
        """
        if epoch != self.epoch or not self._is_resumed:
            self.epoch, self.batches, self._is_resumed = epoch, 0, False
        batches = self._source.batch_sampler
        for each in (self._source.dataset, batches, self._source.sampler, getattr(batches, "sampler", None)):
            set_epoch = getattr(each, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if self.batches and not self._is_resumed:  # the last iteration was left early
            self.epoch, self.batches = self.epoch + 1, 0
        self._is_resumed = False
        skip = 0 if _is_stateful(self.loader) else self.batches
        if self._agreed is not None:
            self._agreed.seed, self._agreed.skip, skip = _mix(self._seed, self.epoch), skip, 0
        # Ranks with the same rows draw the same numbers.
        own_seed = _mix(self._seed, self.epoch, self._part.index)
        state = _RandomState(own_seed)
        if self._generator is not None:
            self._generator.manual_seed(own_seed)
        with state:
            iterator = iter(self.loader)
            for _ in range(skip):
                next(iterator, None)
        while True:
            with state:
                batch = next(iterator, _END)
            if batch is _END:
                break
            self.batches += 1
            yield batch
        self.epoch, self.batches = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: the seed, the epoch, its batches, and a stateful loader's state."""
        state: dict[str, Any] = {"seed": self._seed, "epoch": self.epoch, "batches": self.batches}
        if self._agreed is not None and self._agreed.generator is not None:
            state["generator"] = self._agreed.first_state if self.batches else self._agreed.generator.get_state()
        if _is_stateful(self.loader):
            state["loader"] = self.loader.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, at the next iteration, after the last batch of `state_dict`; all ranks call this together."""
        self._seed, self.epoch, self.batches = state["seed"], state["epoch"], state["batches"]
        self._is_resumed = True
        if "generator" in state and self._agreed is not None and self._agreed.generator is not None:
            self._agreed.generator.set_state(state["generator"])
        if "loader" in state and _is_stateful(self.loader):
            self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]


_END = object()


def _is_stateful(loader: DataLoader[Any]) -> bool:
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


def _rebuild(loader: DataLoader[Any], changes: Mapping[str, Any]) -> DataLoader[Any]:
    """Return a loader of the same class with some arguments changed; the others are read from its attributes."""
    names = [name for name in inspect.signature(type(loader).__init__).parameters if hasattr(loader, name)]
    # Arguments implied by a batch sampler must not be passed with it; an iterable data set has no sampler.
    decided = {"batch_size", "sampler", "drop_last", "shuffle"}
    omitted = decided if "batch_sampler" in changes else {"sampler", "batch_sampler", "shuffle"}
    arguments = {name: getattr(loader, name) for name in names if name not in omitted} | dict(changes)
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        arguments["sampler"] = loader.sampler
    signature = inspect.signature(type(loader))
    try:
        signature.bind(**arguments)
    except TypeError as error:
        absent = [name for name in signature.parameters if name not in arguments]
        lack = f"it has no attribute {' or '.join(absent)}" if absent else f"it does not take {', '.join(arguments)}"
        raise InputError(
            f"{type(loader).__name__} cannot be built from its attributes: {lack}. Give shard_dataloader a "
            "torch.utils.data.DataLoader, or a class with the same arguments."
        ) from error
    return type(loader)(**arguments)
