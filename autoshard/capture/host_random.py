"""Random numbers that `forward` draws from Python and NumPy: no graph can hold what is another in every call."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn

from autoshard.capture._torch import attribute_patch
from autoshard.capture.capture_errors import is_users_file, running_line
from autoshard.capture.counters import READS, Number
from autoshard.capture.mutations import Mutations
from autoshard.capture.reachable import NumPyGenerator
from autoshard.errors import CaptureError

_UNIT = ("rand", "random", "random_sample", "ranf", "sample")  # functions of NumPy that draw from 0 to 1
_default_rng = np.random.default_rng
_SEEDS = ("manual_seed", "seed", "set_rng_state")


@dataclass(slots=True, eq=False)
class RandomStandIn:
    """In place of a number that was drawn: it knows its bounds, and refuses what depends on more.

    So a layer that is dropped with probability 0 is captured, and one that is with another probability is not.

    Attributes:
        low, high: the least and the greatest number that it may be.
        line: the user's that drew it.
    """

    low: float
    high: float
    line: str

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(self.line)

    def __add__(self, other: Any) -> RandomStandIn:
        return RandomStandIn(self.low + _plain(other, self), self.high + other, self.line)

    def __mul__(self, other: Any) -> RandomStandIn:
        ends = self.low * _plain(other, self), self.high * other
        return RandomStandIn(min(ends), max(ends), self.line)

    def __neg__(self) -> RandomStandIn:
        return self * -1

    def __sub__(self, other: Any) -> RandomStandIn:
        return self + -_plain(other, self)

    def __rsub__(self, other: Any) -> RandomStandIn:
        return -self + other

    def __lt__(self, other: Any) -> bool:
        if self.high < _plain(other, self) or self.low >= other:
            return self.high < other
        raise _refusal(self.line)

    def __le__(self, other: Any) -> bool:
        if self.high <= _plain(other, self) or self.low > other:
            return self.high <= other
        raise _refusal(self.line)

    def __gt__(self, other: Any) -> bool:
        return not self <= other

    def __ge__(self, other: Any) -> bool:
        return not self < other

    __radd__, __rmul__ = __add__, __mul__


def _plain(value: Any, drawn: RandomStandIn) -> Number:
    if type(value) not in (int, float, bool):
        raise _refusal(drawn.line)
    number: Number = value
    return number


def _refuse_read(drawn: RandomStandIn, *_: Any, **__: Any) -> NoReturn:
    raise _refusal(drawn.line)


for _name in READS:
    if f"__{_name}__" not in vars(RandomStandIn):
        setattr(RandomStandIn, f"__{_name}__", _refuse_read)


def _refusal(line: str) -> CaptureError:
    return CaptureError(
        f"{line} draws a random number of Python's or NumPy's, and what forward computes depends on it: the captured "
        "graph would have the same number in every call. Draw it outside of forward and pass it as an argument, or "
        "draw it with torch.rand and choose by torch.where. Where it drops layers, set that probability to 0."
    )


class HostRandom:
    """While `forward` is exported, finds what it draws from generators of Python and NumPy that it has not seeded.

    Args:
        mutations: knows the generators of NumPy that `forward` can reach, whose methods can't be replaced: their states
            are compared.
    """

    def __init__(self, mutations: Mutations) -> None:
        self._mutations = mutations
        self._states: list[tuple[str, NumPyGenerator, bytes]] = []
        self._running = False
        self._seeded: dict[int, object] = {}  # generators that give the same numbers in every call
        self._drawn_by_others = False

    @contextlib.contextmanager
    def watching(self, module: nn.Module) -> Iterator[None]:
        """Context of the export of a module."""
        hooks = module.register_forward_pre_hook(self._begin), module.register_forward_hook(self._end)
        try:
            with contextlib.ExitStack() as stack:
                for owner, name, value in self._patches():
                    stack.enter_context(attribute_patch(owner, name, value))
                yield
        finally:
            self._running = False
            for hook in hooks:
                hook.remove()

    def _begin(self, *_: Any) -> None:
        self._state, self._running = _state(), True
        self._states = [(path, one, pickle.dumps(_state_of(one))) for path, one in self._mutations.generators()]

    def _end(self, module: nn.Module, *_: Any) -> None:
        self._running = False
        for path, generator, state in self._states:
            if pickle.dumps(_state_of(generator)) != state:
                _set_state(generator, pickle.loads(state))
                raise _refusal(self._mutations.line_of(path))
        if not (self._seeded or self._drawn_by_others or _state() == self._state):
            raise _refusal(f"forward of {type(module).__name__}")

    def _patches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Owners and names of what draws or seeds, and what stands in its place."""
        kind, shared = random.Random, random.random.__self__  # type: ignore[attr-defined]
        draw, bits, seed = kind.random, kind.getrandbits, kind.seed

        def drawing(own: Any) -> Any:
            return RandomStandIn(0.0, 1.0, running_line()) if self._is_watched(own) else draw(own)

        def drawing_bits(own: Any, count: int) -> int:
            if self._is_watched(own):
                raise _refusal(running_line())
            return bits(own, count)

        def seeding(own: Any, a: Any = None, version: int = 2) -> None:
            self._note_seed(own, a)
            seed(own, a, version)

        for name, value in (("random", drawing), ("getrandbits", drawing_bits), ("seed", seeding)):
            yield kind, name, value
            yield random, name, _bound(value, shared)
        yield np.random, "default_rng", self._generator
        for name in dir(np.random):
            function = getattr(np.random, name)
            if isinstance(getattr(function, "__self__", None), np.random.RandomState) and not name.endswith("_state"):
                yield np.random, name, self._wrap_numpy(name, function)
        for owner in (torch, torch.random, torch.cuda):
            for name in _SEEDS:
                if hasattr(owner, name):
                    yield owner, name, self._wrap_torch(getattr(owner, name))

    def _generator(self, seed: Any = None) -> np.random.Generator:
        if seed is None and self._running and _called_by_user():
            raise _refusal(running_line())
        return _default_rng(seed)

    def _wrap_numpy(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        own = function.__self__  # type: ignore[attr-defined]

        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "seed":
                self._note_seed(own, args[0] if args else kwargs.get("seed"))
            elif self._is_watched(own):
                if name in _UNIT and not (args or kwargs):
                    return RandomStandIn(0.0, 1.0, running_line())
                if (
                    name == "uniform"
                    and not kwargs
                    and len(args) == 2
                    and all(type(one) in (int, float) for one in args)
                ):
                    return RandomStandIn(*args, running_line())
                raise _refusal(running_line())
            return function(*args, **kwargs)

        return run

    def _wrap_torch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running and _called_by_user():
                raise CaptureError(
                    f"{running_line()} sets the seed of torch's random numbers in forward, which the programs of a "
                    "parallelised module do not draw from: they have a seed of their own for each step. Set it outside "
                    "of forward, or make fixed numbers a buffer."
                )
            return function(*args, **kwargs)

        return run

    def _note_seed(self, own: object, seed: object) -> None:
        if self._running and seed is not None:
            self._seeded[id(own)] = own

    def _is_watched(self, own: object) -> bool:
        """Whether code of the user's draws what it has not seeded."""
        if not self._running or id(own) in self._seeded:
            return False
        if _called_by_user():
            return True
        self._drawn_by_others = True
        return False


def _state_of(generator: NumPyGenerator) -> Any:
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _set_state(generator: NumPyGenerator, state: Any) -> None:
    if isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _bound(function: Callable[..., Any], own: object) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(own, *args, **kwargs)


def _called_by_user() -> bool:
    """Whether what called a function of this file, by way of the module `random` or not, is code of the user's."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, random.__file__):
        frame = frame.f_back
    return is_users_file(frame.f_code.co_filename)


def _state() -> tuple[Any, bytes]:
    """The state of the generators that Python and NumPy share with everybody."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002, what models draw from
    return (random.getstate(), kind, *rest), np.asarray(keys).tobytes()
