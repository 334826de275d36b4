"""The soundness of rules for operators that draw at random, whose results can not be compared number by number.

What a strategy draws must be a function of the step's seed alone, the same on replicas, different on shards, and
distributed as what the operator draws on one device: as a whole (two-sample Kolmogorov-Smirnov) and at every position
(means). The seeds are fixed, so that a finding is found each time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autoshard.patterns._torch import OpOverload
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec
from autoshard.specs.tensors import shard, unshard

Coordinate = tuple[int, ...]
Shards = Mapping[Coordinate, torch.Tensor]

_SEED_COUNT = 32
_FALSE_ALARM_RATE = 1e-7
"""The rate at which a right strategy would be called wrong, were the seeds not fixed."""


@dataclass(frozen=True, slots=True)
class Draws:
    """The results of an operator on whole tensors, under one seed each.

    Attributes:
        whole: its results as a tuple, for every seed; those under the first seed alone if nothing is random.
        random: True if the seed matters.
    """

    whole: tuple[tuple[Any, ...], ...]
    random: bool

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds to run a strategy under: where the numbers are random, the first one comes again at the end."""
        return (*range(len(self.whole)), 0) if self.random else (0,)

    def problems(
        self, runs: Sequence[Sequence[Shards | None]], specs: Sequence[Spec], mesh: MeshShape
    ) -> Iterator[str]:
        """Yield the problems of a strategy's results.

        Args:
            runs: for every one of `seeds`, the shards of every result; None for a result that is no tensor.
            specs: where the results should lie.
        """
        for position, spec in enumerate(specs):
            shards = [one for run in runs if (one := run[position]) is not None]
            if shards:
                problem = _problem(shards, [result[position] for result in self.whole], spec, mesh)
                if problem is not None:
                    yield f"result {position}: as {spec} {problem}"


def reference_draws(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Draws:
    """Run an operator on whole tensors, as often as it takes to know what it draws. The generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        first = _run(op, args, kwargs, 0)
        seeded = torch.Tag.nondeterministic_seeded in op.tags
        whole = (first, *(_run(op, args, kwargs, seed) for seed in range(1, _SEED_COUNT if seeded else 1)))
        # A few draws out of few outcomes, such as three coins, may come up alike under some of the seeds.
        pairs = (pair for other in whole[1:] for pair in zip(first, other, strict=True))
        random = not all(torch.equal(*pair) for pair in pairs if isinstance(pair[0], torch.Tensor))
        return Draws(whole if random else (first,), random)


def _run(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
    torch.manual_seed(seed)
    result = op(*args, **kwargs)
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def _problem(shards: Sequence[Shards], whole: Sequence[torch.Tensor], spec: Spec, mesh: MeshShape) -> str | None:
    """Return the problem of one result: its shards under every seed, then the first again, beside the operator's."""
    problem = layout_problem(shards[0], spec, mesh, whole[0])
    problem = problem or next(filter(None, (_replica_problem(held, spec, mesh) for held in shards)), None)
    if problem is not None:
        return problem
    *drawn, again = [_numbers(unshard(held, spec, mesh, whole[0].shape)) for held in shards]
    if not torch.equal(drawn[0], again):
        return "what is drawn does not follow from the step's seed: the same seed gave different numbers"
    together, expected = torch.stack(drawn), torch.stack([_numbers(value) for value in whole])
    return _distribution_problem(together, expected) or _shard_problem(together, expected, spec, mesh)


def _numbers(values: torch.Tensor) -> torch.Tensor:
    """The values as float64, of complex ones the real and imaginary parts along a last dim."""
    return (torch.view_as_real(values) if values.is_complex() else values).to(torch.float64)


def layout_problem(shards: Shards, spec: Spec, mesh: MeshShape, whole: torch.Tensor) -> str | None:
    """Return the problem of the dtypes or shapes of shards that should lie as `spec` says; None without one."""
    dtypes, shapes = {value.dtype for value in shards.values()}, {tuple(value.shape) for value in shards.values()}
    if dtypes != {whole.dtype}:
        return f"its dtype is {dtypes}, not {whole.dtype}"
    expected = local_shape(whole.shape, spec, mesh)
    if shapes != {expected}:
        return f"a shard has shape {list(expected)}, but the local program gave {sorted(shapes)}"
    return None


def _replica_problem(shards: Shards, spec: Spec, mesh: MeshShape) -> str | None:
    replicated = [axis for axis, placement in enumerate(spec) if placement.is_replicate()]
    for coordinate, value in shards.items():
        first = tuple(0 if axis in replicated else place for axis, place in enumerate(coordinate))
        # What pads an uneven shard may be no number, and counts for nothing, but it is the same on replicas.
        if not torch.allclose(value, shards[first], rtol=0, atol=0, equal_nan=True):
            return f"replicas draw different numbers: the rank at {coordinate} and that at {first}"
    return None


def _distribution_problem(drawn: torch.Tensor, whole: torch.Tensor) -> str | None:
    """Return a problem if two samples, the draws along the first dim, do not come from one distribution."""
    count = whole.numel()
    distance = _distribution_distance(drawn.flatten(), whole.flatten())
    limit = math.sqrt(-math.log(_FALSE_ALARM_RATE / 2) / 2) * math.sqrt(2 / count)
    if distance > limit:
        return f"the numbers are distributed otherwise: Kolmogorov-Smirnov distance {distance:.3g}, above {limit:.3g}"
    # A floor under the deviation of a mean: 32 draws of a rare event may all be alike.
    spread = (drawn.var(0) + whole.var(0)) / len(whole) + 1e-4 * whole.var(0).mean()
    score = ((drawn.mean(0) - whole.mean(0)).abs() / spread.sqrt().clamp_min(1e-12)).max().item()
    if score > 7:
        return f"the mean at some position is {score:.3g} standard deviations from the operator's own"
    return None


def _distribution_distance(first: torch.Tensor, second: torch.Tensor) -> float:
    """The Kolmogorov-Smirnov distance of two samples: the largest difference between their distribution functions."""
    points = torch.cat([first, second]).unique()
    shares = [
        torch.searchsorted(sample.sort().values, points, right=True) / sample.numel() for sample in (first, second)
    ]
    return (shares[0] - shares[1]).abs().max().item()


def _shard_problem(drawn: torch.Tensor, whole: torch.Tensor, spec: Spec, mesh: MeshShape) -> str | None:
    """Return a problem if two shards draw the same numbers: then they go up and down together over the seeds."""
    for axis in spec.shard_axes:
        first, *others = (
            tuple(place * (number == axis) for number in range(mesh.ndim)) for place in range(mesh.sizes[axis])
        )
        for other in others:
            together = _correlation(drawn, spec, mesh, first, other)
            if together > 0.5 > abs(_correlation(whole, spec, mesh, first, other)) + 0.25:
                return f"the shards at {first} and {other} draw the same numbers: their correlation is {together:.3g}"
    return None


def _correlation(values: torch.Tensor, spec: Spec, mesh: MeshShape, first: Coordinate, second: Coordinate) -> float:
    """Correlation over the draws, position by position, of the parts of two ranks."""
    cut = [torch.stack([shard(draw, spec, mesh, coordinate) for draw in values]) for coordinate in (first, second)]
    common = [slice(min(sizes)) for sizes in zip(*(part.shape for part in cut), strict=True)]
    parts = [part[tuple(common)] - part[tuple(common)].mean(0) for part in cut]
    norm = (parts[0].square().sum() * parts[1].square().sum()).sqrt().clamp_min(1e-12)
    return ((parts[0] * parts[1]).sum() / norm).item()
