"""Copies that both halves of a step use: kept from the forward half, or made again in the backward half.

A tensor that is gathered for its uses in the forward half is often wanted gathered in the backward half too. The copy
may be kept in between, which holds memory, or freed and made again from where the tensor lies, which takes the time of
a second gather (TensorOpt 4.2, tensor reuse; for parameters the one is ZeRO-2, the other ZeRO-3).

In the problem the forward half has a hub, whose options are specs, and the backward half another one, whose options are
`RegatherChoice`s. Every cost is one of two of the three variables: where the tensor lies, and the two hubs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autoshard.specs.spec import Spec

Reuse = Literal["none", "inputs", "all"]
"""Of what copies it is open whether they are kept or made again: of none, of the step's inputs, of activations too."""


@dataclass(frozen=True, slots=True)
class RegatherChoice:
    """What the uses of the backward half share.

    Attributes:
        spec: of the copy.
        kept: whether it is the copy that the forward half made.
    """

    spec: Spec
    kept: bool


def regather_choices(specs: Sequence[Spec]) -> tuple[RegatherChoice, ...]:
    """The options of the hub of the backward half: made again as each of the specs, then kept as each of them."""
    return tuple(RegatherChoice(spec, kept) for kept in (False, True) for spec in specs)


def tie_costs(specs: int) -> np.ndarray:
    """The edge from the forward half's hub: what is kept is what it made; all else goes with anything."""
    return np.hstack([np.zeros((specs, specs)), np.where(np.eye(specs, dtype=bool), 0.0, np.inf)])


@dataclass(frozen=True, slots=True, eq=False)
class RegatherEdge:
    """The edge from where a tensor lies to the hub of the backward half.

    Attributes:
        seconds: of the reshard, where the copy is made again.
        between: bytes held from the last use in the forward half to the first in the backward half.
        after: bytes held from that to the last use in the backward half.
    """

    seconds: np.ndarray
    between: np.ndarray
    after: np.ndarray


def regather_edge(seconds: np.ndarray, copied: np.ndarray, lying: np.ndarray) -> RegatherEdge:
    """The edge from where the tensor lies to the hub of the backward half.

    Args:
        seconds: of a reshard from every way of lying (rows) to every spec of the hubs (columns).
        copied: bytes that such a copy holds; zero where the tensor lies so.
        lying: bytes that the tensor itself holds, for every way of lying, if it is held for the backward half alone;
            zeros if it is held anyway, as inputs of the step are.
    """
    lies = (copied == 0) * lying[:, None]  # it is read itself: no copy is made
    source = (copied > 0) * lying[:, None]  # what the copy is made of again
    return RegatherEdge(
        seconds=np.hstack([seconds, np.zeros_like(seconds)]),
        between=np.hstack([lies + source, lies + copied]),
        after=np.hstack([lies + copied, lies + copied]),
    )


def hubs_from_choices(hubs: Mapping[str, Spec], chosen: Mapping[str, RegatherChoice]) -> dict[str, Spec]:
    """The hubs of some decisions: one for both halves where a copy is kept, else one for each.

    Args:
        hubs: all hubs but those of the backward half, by key.
        chosen: these, by the name of the value.
    """
    found = dict(hubs)
    for name, reread in chosen.items():
        forward = found.pop(f"{name}@forward")
        if reread.kept:
            found[name] = reread.spec
        else:
            found |= {f"{name}@forward": forward, f"{name}@backward": reread.spec}
    return found


def choices_from_hubs(
    hubs: Mapping[str, Spec], names: Iterable[str]
) -> tuple[dict[str, Spec], dict[str, RegatherChoice]]:
    """What `hubs_from_choices` was given, for hubs and the names of the values that both halves use."""
    found, chosen = dict(hubs), {}
    for name in names:
        kept = name in found
        forward = found.pop(name) if kept else found[f"{name}@forward"]
        found[f"{name}@forward"] = forward
        chosen[name] = RegatherChoice(forward if kept else found.pop(f"{name}@backward"), kept)
    return found, chosen
