"""Layers of a module that repeat with a period, and copies of the module with fewer of them."""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import lt
from typing import NamedTuple

import torch
from torch import nn

from autoshard.capture.python.guards import is_plain

# Attributes of a module that are not its settings.
_TABLES = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_INDEX = re.compile(r"\d+(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Repetition:
    """Repeated elements of a list of modules: `count` periods of `period` elements, from `start` on.

    Attributes:
        path: the path of the list; empty for the root module.
        start: the number of elements before the first period.
        period: the number of elements per period, such as 2 if every second layer has experts.
        count: the number of periods.
        size: the number of elements of the list.
    """

    path: str
    start: int
    period: int
    count: int
    size: int


class LayerPlace(NamedTuple):
    """A period of a repetition, both by index."""

    repetition: int
    period: int


class Depth:
    """Paths of a module whose repetitions have a given number of periods.

    Args:
        repetitions: the repetitions to shorten or continue.
        count: the number of periods of each.
    """

    def __init__(self, repetitions: Sequence[Repetition], count: int) -> None:
        self.repetitions = tuple(repetitions)
        self.count = count
        # Cached: paths come from all nodes, of which a module has many.
        self._locate = functools.cache(self._locate_uncached)
        self._move = functools.cache(self._move_uncached)

    def locate(self, path: str) -> tuple[LayerPlace | None, str]:
        """Return the period of a path, and a text that is equal for corresponding paths.

        Paths correspond if they are the same part of different periods, or the same part after the last period. The
        path may be that of a tensor or of a module.
        """
        return self._locate(path)

    def move(self, path: str, period: int | None, count: int) -> str:
        """Return the corresponding path in another period of a module with another number of periods.

        Args:
            path: the path of a module or tensor.
            period: the new period; None for a path outside all periods.
            count: the number of periods of the other module.
        """
        return self._move(path, period, count)

    def _move_uncached(self, path: str, period: int | None, count: int) -> str:
        found = self._element(path)
        if found is None:
            return path
        number, index = found
        place, _ = self.locate(path)
        repetition = self.repetitions[number]
        if place is not None:
            if period is None:
                return path
            index += (period - place.period) * repetition.period
        elif index >= repetition.start:
            index += (count - self.count) * repetition.period
        head = f"{repetition.path}." if repetition.path else ""
        return f"{head}{index}{_INDEX.sub('', path[len(head) :], count=1)}"

    def _element(self, path: str) -> tuple[int, int] | None:
        """Return the index of the repetition whose list contains a path, and the path's index in the list."""
        for number, repetition in enumerate(self.repetitions):
            head = f"{repetition.path}." if repetition.path else ""
            if path.startswith(head) and (match := _INDEX.match(path, len(head))):
                return number, int(match[0])
        return None

    def _locate_uncached(self, path: str) -> tuple[LayerPlace | None, str]:
        found = self._element(path)
        if found is None:
            return None, path
        number, index = found
        repetition = self.repetitions[number]
        head = f"{repetition.path}." if repetition.path else ""
        rest = _INDEX.sub("", path[len(head) :], count=1)
        end = repetition.start + self.count * repetition.period
        if index < repetition.start:
            return None, path
        if index >= end:
            return None, f"{head}[end+{index - end}]{rest}"
        period, within = divmod(index - repetition.start, repetition.period)
        return LayerPlace(number, period), f"{head}[{within}]{rest}"


def find_repetitions(module: nn.Module, least: int) -> tuple[Repetition, ...]:
    """Return repetitions with equal numbers of periods: those with the most layers in total.

    Repeated layers have the same classes, plain attributes, parameters and buffers, except for attributes that count
    the layers. Other influences on a layer's call are not visible here.

    Args:
        module: the module.
        least: the minimum number of periods.
    """
    found: list[Repetition] = []
    for path, part in module.named_modules():
        inside = any(path.startswith(f"{known.path}." if known.path else "") for known in found)
        if not inside and list(part._modules) == [str(index) for index in range(len(part._modules))]:
            repetition = _repetition_in(path, [child for child in part._modules.values() if child is not None])
            if repetition is not None and repetition.count >= least and repetition.size == len(part._modules):
                found.append(repetition)
    layers: Counter[int] = Counter()
    for repetition in found:
        layers[repetition.count] += repetition.count * repetition.period
    best = max(layers, key=lambda count: layers[count], default=None)
    return tuple(repetition for repetition in found if repetition.count == best)


def _repetition_in(path: str, elements: Sequence[nn.Module]) -> Repetition | None:
    """Return the longest repetition of a list's elements; of equally long ones, that with the shortest period."""
    if len(elements) < 2 or len({id(element) for element in elements}) < len(elements):
        return None
    keys = _keys(elements)
    best: Repetition | None = None
    for period in range(1, len(keys) // 2 + 1):
        length = start = 0
        # `length` consecutive elements up to here equal those one period earlier.
        for index in range(period, len(keys) + 1):
            if index < len(keys) and keys[index] == keys[index - period]:
                length += 1
                continue
            start = index - period - length
            count = (length + period) // period
            if count > 1 and (best is None or count * period > best.count * best.period):
                best = Repetition(path, start, period, count, len(keys))
            length = 0
    return best


def _keys(elements: Sequence[nn.Module]) -> list[Hashable]:
    """Return a key of every element, equal for elements that differ at most in attributes that count them."""
    settings = [dict(_settings(element)) for element in elements]
    names = dict.fromkeys(name for each in settings for name in each)
    counting = {name for name in names if _is_counting([each[name] for each in settings if name in each])}
    return [
        (_structure(element), tuple((name, repr(value)) for name, value in values.items() if name not in counting))
        for element, values in zip(elements, settings, strict=True)
    ]


def _is_counting(values: Sequence[object]) -> bool:
    """Return True for strictly increasing integers."""
    numbers = [value for value in values if type(value) is int]
    return len(numbers) == len(values) > 1 and all(map(lt, numbers, numbers[1:]))


def _settings(element: nn.Module) -> Iterator[tuple[tuple[str, str], object]]:
    """Yield path, name and value of the plain attributes of the modules of a layer."""
    for path, part in element.named_modules():
        for name, value in vars(part).items():
            if name not in _TABLES and (is_plain(value) or _is_plain_sequence(value)):
                yield (path, name), value


def _is_plain_sequence(value: object) -> bool:
    return isinstance(value, (tuple, list)) and all(map(is_plain, value))


def _structure(element: nn.Module) -> Hashable:
    """Return the classes, hooks and tensors of a layer's modules."""
    parts = []
    for path, part in element.named_modules():
        tensors = (*part._parameters.items(), *part._buffers.items(), *vars(part).items())
        tables = [(name, table) for name, table in vars(part).items() if name.endswith("_hooks")]
        # No record of forward shows the effects of backward hooks, so layers with different ones are different.
        hooks = tuple(tuple(map(id, table.values())) if "backward" in name else len(table) for name, table in tables)
        held = tuple(
            (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
            for name, tensor in tensors
            if isinstance(tensor, torch.Tensor)
        )
        parts.append((path, type(part), hooks, held))
    return tuple(parts)


@contextlib.contextmanager
def with_periods(module: nn.Module, repetitions: Sequence[Repetition], count: int) -> Iterator[nn.Module]:
    """Context in which the repetitions of a module have only their first `count` periods; yields the module."""
    lists = [module.get_submodule(repetition.path) for repetition in repetitions]
    before = [dict(part._modules) for part in lists]
    for part, repetition in zip(lists, repetitions, strict=True):
        elements = list(part._modules.values())
        end = repetition.start + repetition.period * repetition.count
        kept = elements[: repetition.start + repetition.period * count] + elements[end:]
        part._modules.clear()
        part._modules.update({str(index): element for index, element in enumerate(kept)})
    try:
        yield module
    finally:
        for part, elements_before in zip(lists, before, strict=True):
            part._modules.clear()
            part._modules.update(elements_before)
