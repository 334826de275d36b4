"""Random numbers that `forward` draws from Python and NumPy, which no graph can hold."""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from autoshard.capture._torch import attribute_patch
from autoshard.capture.capture_errors import is_users_file, running_line
from autoshard.capture.python.counters import READS, Number
from autoshard.capture.python.mutations import Mutations
from autoshard.capture.python.reachable import NumPyGenerator
from autoshard.errors import CaptureError

_UNIT = ("rand", "random", "random_sample", "ranf", "sample")  # functions of NumPy that draw from 0 to 1
# Read before it is replaced.
_default_rng = np.random.default_rng
_SEEDS = ("manual_seed", "seed", "set_rng_state")


@dataclass(slots=True, eq=False)
class RandomStandIn:
    """Stand-in for a random number: an interval, which refuses comparisons that it does not decide.

    A layer that is dropped with probability 0 is captured; a layer with another probability is refused.

    Attributes:
        low, high: the least and the greatest possible number.
        line: the user's line that drew it.
    """

    low: float
    high: float
    line: str

    def __getattr__(self, name: str) -> NoReturn:
        raise _refusal(self.line)

    def __add__(self, number: Any) -> RandomStandIn:
        return RandomStandIn(self.low + _plain(number, self), self.high + number, self.line)

    def __mul__(self, number: Any) -> RandomStandIn:
        # A negative factor swaps the ends.
        ends = self.low * _plain(number, self), self.high * number
        return RandomStandIn(min(ends), max(ends), self.line)

    def __neg__(self) -> RandomStandIn:
        return self * -1

    def __sub__(self, number: Any) -> RandomStandIn:
        return self + -_plain(number, self)

    def __rsub__(self, number: Any) -> RandomStandIn:
        return -self + number

    def __lt__(self, number: Any) -> bool:
        # All numbers of the interval have to give the same answer.
        if self.high < _plain(number, self) or self.low >= number:
            return self.high < number
        raise _refusal(self.line)

    def __le__(self, number: Any) -> bool:
        if self.high <= _plain(number, self) or self.low > number:
            return self.high <= number
        raise _refusal(self.line)

    def __gt__(self, number: Any) -> bool:
        return not self <= number

    def __ge__(self, number: Any) -> bool:
        return not self < number

    __radd__, __rmul__ = __add__, __mul__


def _plain(value: Any, stand_in: RandomStandIn) -> Number:
    if type(value) not in (int, float, bool):
        raise _refusal(stand_in.line)
    number: Number = value
    return number


def _refuse_read(stand_in: RandomStandIn, *_: Any, **__: Any) -> NoReturn:
    raise _refusal(stand_in.line)


for _name in READS:  # all other operators that read a number
    if f"__{_name}__" not in vars(RandomStandIn):
        setattr(RandomStandIn, f"__{_name}__", _refuse_read)


def _refusal(line: str) -> CaptureError:
    return CaptureError(
        f"{line} draws a random number of Python's or NumPy's, and what forward computes depends on it: the captured "
        "graph would have the same number in every call. Draw it outside of forward and pass it as an argument, or "
        "draw it with torch.rand and choose by torch.where. Where it drops layers, set that probability to 0."
    )


class HostRandom:
    """Watches, during export, what `forward` draws from unseeded generators of Python and NumPy.

    Args:
        mutations: its `generators` are those of NumPy that `forward` can reach.

    Attributes:
        running: True while `forward` runs.
    """

    def __init__(self, mutations: Mutations) -> None:
        self._mutations = mutations
        # Methods of NumPy's generators cannot be patched, so compare their pickled states before and after.
        self._states: list[tuple[str, NumPyGenerator, bytes]] = []
        self.running = False
        self._seeded: dict[int, object] = {}  # generators that return the same numbers in every call, by id
        self._drawn_by_others = False  # True once a library, such as torch itself, has drawn a number

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the export, in which functions that draw and seed are replaced."""
        with contextlib.ExitStack() as stack:
            for owner, name, value in self._patches():
                stack.enter_context(attribute_patch(owner, name, value))
            yield

    def begin(self) -> None:
        """Begin to watch a call."""
        self._state, self.running = _state(), True
        # Restored after an error, so that a refused capture does not change the user's generators.
        self._states = [
            (path, generator, pickle.dumps(_state_of(generator))) for path, generator in self._mutations.generators()
        ]

    def end(self, model: str) -> None:
        """Raise a `CaptureError` if the call of a model of this name drew numbers in a way that no patch sees."""
        for path, generator, state in self._states:
            if pickle.dumps(_state_of(generator)) != state:
                _set_state(generator, pickle.loads(state))
                raise _refusal(self._mutations.line_of(path))
        # Code may also draw from shared generators unseen by patches, such as by methods in variables.
        if not (self._seeded or self._drawn_by_others or _state() == self._state):
            raise _refusal(f"forward of {model}")

    def _patches(self) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
        """Yield the owners and names of functions that draw or seed, with their replacements."""
        # Functions of `random` are methods bound to one shared generator: both the class and the module are patched.
        kind, shared = random.Random, random.random.__self__  # type: ignore[attr-defined]
        draw, bits, seed = kind.random, kind.getrandbits, kind.seed

        def drawing(generator: Any) -> Any:
            return RandomStandIn(0.0, 1.0, running_line()) if self._is_watched(generator) else draw(generator)

        def drawing_bits(generator: Any, count: int) -> int:
            if self._is_watched(generator):
                raise _refusal(running_line())
            return bits(generator, count)

        # Argument names are those of `random.seed`, since callers may pass keywords.
        def seeding(generator: Any, a: Any = None, version: int = 2) -> None:
            self._note_seed(generator, a)
            seed(generator, a, version)

        for name, value in (("random", drawing), ("getrandbits", drawing_bits), ("seed", seeding)):
            yield kind, name, value
            yield random, name, partial(value, shared)
        yield np.random, "default_rng", self._generator
        shared_numpy = np.random.random.__self__  # type: ignore[attr-defined]
        for name in dir(np.random):
            function = getattr(np.random, name)
            is_method = isinstance(getattr(function, "__self__", None), np.random.RandomState)
            # Some are functions around a method, without a generator.
            if (is_method or name in ("seed", "sample", "ranf")) and not name.endswith("_state"):
                yield np.random, name, self._wrap_numpy(name, function, shared_numpy)
        for owner in (torch, torch.random, torch.cuda):
            for name in _SEEDS:
                if hasattr(owner, name):
                    yield owner, name, self._wrap_torch(getattr(owner, name))

    def _generator(self, seed: Any = None) -> np.random.Generator:
        # With a seed, numbers are equal in every call, and constants of the graph.
        if seed is None and self.running and _called_by_user():
            raise _refusal(running_line())
        return _default_rng(seed)

    def _wrap_numpy(self, name: str, function: Callable[..., Any], generator: object) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if name == "seed":
                self._note_seed(generator, args[0] if args else kwargs.get("seed"))
            elif self._is_watched(generator):
                if name in _UNIT and not (args or kwargs):
                    return RandomStandIn(0.0, 1.0, running_line())
                if (
                    name == "uniform"
                    and not kwargs
                    and len(args) == 2
                    and all(type(bound) in (int, float) for bound in args)
                ):
                    return RandomStandIn(*args, running_line())
                raise _refusal(running_line())
            return function(*args, **kwargs)

        return run

    def _wrap_torch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self.running and _called_by_user():
                raise CaptureError(
                    f"{running_line()} sets the seed of torch's random numbers in forward, which the programs of a "
                    "parallelised module do not draw from: they have a seed of their own for each step. Set it outside "
                    "of forward, or make fixed numbers a buffer."
                )
            return function(*args, **kwargs)

        return run

    def _note_seed(self, generator: object, seed: object) -> None:
        if self.running and seed is not None:
            self._seeded[id(generator)] = generator

    def _is_watched(self, generator: object) -> bool:
        """Return True if the user's code draws from a generator that it has not seeded."""
        if not self.running or id(generator) in self._seeded:
            return False
        # A library draws for its own purposes, such as file names, on which no result of the model should depend.
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


def _called_by_user() -> bool:
    """Return True if the caller of this file's functions is the user's code, directly or through `random`."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename in (__file__, random.__file__):
        frame = frame.f_back
    return is_users_file(frame.f_code.co_filename)


def _state() -> tuple[Any, bytes]:
    """Return the states of the shared generators of Python and NumPy."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002, models draw from it
    return (random.getstate(), kind, *rest), np.asarray(keys).tobytes()
