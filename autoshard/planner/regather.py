"""Values that both halves of a step use: kept, gathered again, recomputed, or moved to the host in between.

A tensor that is gathered for its uses in the forward half is often needed gathered in the backward half too. The copy
may be kept in between, which takes memory, or freed and gathered again, which takes time (TensorOpt 4.2, tensor reuse;
for parameters the first is ZeRO-2, the second ZeRO-3).

In the problem the forward half has a hub, whose options are specs, and the backward half has another one, whose options
are `RegatherChoice`s. Every cost depends on two variables among the tensor itself, the two hubs, and the operator of
the backward half that may recompute it, if there is one (`rerun_context.py`).
`value_lifetimes.py` says which values may be gathered again, and when they are held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from autoshard.capture.recomputation import rerun_name
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import GraphRules
from autoshard.specs.spec import Spec

Reuse = Literal["none", "inputs", "all"]
"""Values whose copies may be gathered again: no values, inputs of the step, or activations too."""

Origin = Literal["gathered", "kept", "rerun", "moved", "absent"]
"""How the backward half gets a value: gathered again from the kept tensor; kept, as the copy of the forward half;
recomputed by its operator; moved back from the host; or not at all, since nothing reads it there."""

MOVED = "@moved"
"""Suffix of the hub key of a moved value, for the spec in which the backward half reads it."""

MADE_ONCE: tuple[Origin, ...] = ("gathered", "kept")
"""The origins of a value that the backward half needs and that is not recomputed."""


@dataclass(frozen=True, slots=True)
class RegatherChoice:
    """An option of the hub of the backward half.

    Attributes:
        spec: the spec of the copy.
        origin: where it comes from.
    """

    spec: Spec
    origin: Origin

    @property
    def kept(self) -> bool:
        """True if it is the copy that the forward half made."""
        return self.origin == "kept"


def regather_choices(specs: Sequence[Spec], origins: Sequence[Origin] = MADE_ONCE) -> tuple[RegatherChoice, ...]:
    """Return the options of the hub of the backward half: every spec for each origin, and one for `"absent"`."""
    return tuple(
        RegatherChoice(spec, origin) for origin in origins for spec in (specs[:1] if origin == "absent" else specs)
    )


def tie_costs(specs: int, origins: Sequence[Origin] = MADE_ONCE) -> np.ndarray:
    """Return the costs between the two hubs of so many specs: a kept copy has the spec of the forward half."""
    kept = np.where(np.eye(specs, dtype=bool), 0.0, np.inf)
    return np.hstack([kept if origin == "kept" else _nothing(specs, specs, origin) for origin in origins])


def _nothing(rows: int, specs: int, origin: Origin) -> np.ndarray:
    """Return zeros for the columns of an origin that costs nothing in a table."""
    return np.zeros((rows, 1 if origin == "absent" else specs))


@dataclass(frozen=True, slots=True, eq=False)
class RegatherEdge:
    """The edge from a tensor to the hub of the backward half.

    Attributes:
        seconds: seconds of the reshard, if the copy is gathered again.
        between: bytes held from the last use in the forward half to the first in the backward half.
        after: bytes held from there to the last use in the backward half.
    """

    seconds: np.ndarray
    between: np.ndarray
    after: np.ndarray


def regather_edge(
    seconds: np.ndarray,
    copied: np.ndarray,
    held: np.ndarray,
    origins: Sequence[Origin] = MADE_ONCE,
    moves: np.ndarray | None = None,
) -> RegatherEdge:
    """Return the edge from a tensor to the hub of the backward half.

    Args:
        seconds: seconds of the reshard from every spec of the tensor (rows) to every spec of the hubs (columns).
        copied: bytes of the copy; zero where both specs are the same.
        held: bytes of the tensor itself under every spec, if it is held only for the backward half; zeros if it is
            always held, as inputs of the step are.
        origins: the origins of the hub's options.
        moves: seconds of the tensor's copies to the host and back under each of its specs, if it may move.
    """
    read = (copied == 0) * held[:, None]  # the tensor itself is read: there is no copy
    source = (copied > 0) * held[:, None]  # kept to gather the copy again
    parts = {
        "gathered": (seconds, read + source, read + copied),
        "kept": (np.zeros_like(seconds), read + copied, read + copied),
    }
    if moves is not None:
        # The device holds nothing in between, then the copy from the host, in the spec that is read.
        parts["moved"] = seconds + moves[:, None], np.zeros_like(seconds), read + copied
    rows, specs = seconds.shape
    tables = [parts.get(origin) or (_nothing(rows, specs, origin),) * 3 for origin in origins]
    return RegatherEdge(*(np.hstack(columns) for columns in zip(*tables, strict=True)))


def rerun_edge(seconds: np.ndarray, copied: np.ndarray, origins: Sequence[Origin]) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds and the bytes of the edge from an optional second operator to the hub of its value.

    Args:
        seconds: seconds of the reshard from its result under every strategy (rows) to every spec of the hub (columns).
        copied: bytes of the copy; zero where both specs are the same.
        origins: the origins of the hub's options.

    Returns:
        Tables with one more row, for an absent operator.
    """
    absent = np.full((1, seconds.shape[1]), np.inf)
    tables = {"rerun": (np.vstack([seconds, absent]), np.vstack([copied, np.zeros_like(absent)]))}
    nothing = [_nothing(len(seconds) + 1, seconds.shape[1], origin) for origin in origins]
    pairs = [tables.get(origin, (none, none)) for origin, none in zip(origins, nothing, strict=True)]
    return np.hstack([pair[0] for pair in pairs]), np.hstack([pair[1] for pair in pairs])


def hubs_from_choices(hubs: Mapping[str, Spec], choices: Mapping[str, RegatherChoice]) -> dict[str, Spec]:
    """Return the hubs of some decisions: one for both halves if a copy is kept, else one for each half.

    Args:
        hubs: key -> spec of all hubs but those of `choices`.
        choices: name of a value -> the option of its hub of the backward half.
    """
    merged = dict(hubs)
    for name, choice in choices.items():
        if choice.kept:
            # A kept copy is one hub for both halves.
            merged.pop(f"{name}@forward", None)
            merged[name] = choice.spec
        elif choice.origin == "gathered":
            merged[f"{name}@backward"] = choice.spec
        elif choice.origin == "rerun":
            merged[rerun_name(name)] = choice.spec
        elif choice.origin == "moved":
            merged[name + MOVED] = choice.spec
    return merged


def choices_from_hubs(
    hubs: Mapping[str, Spec], names: Iterable[str]
) -> tuple[dict[str, Spec], dict[str, tuple[Origin, Spec | None]]]:
    """Return the hubs of some decisions as a problem has them: the inverse of `hubs_from_choices`.

    Args:
        hubs: key -> spec.
        names: names of the values that have a hub of the backward half.

    Returns:
        Key -> spec of all hubs but those of the backward half; and name of a value -> origin and spec of its hub of the
        backward half, with None as the spec of an absent value.
    """
    # `separate` gets a forward hub for every name: the problem has one even for a kept copy.
    separate, choices = dict(hubs), dict[str, tuple[Origin, Spec | None]]()
    for name in names:
        if name in separate:
            separate[f"{name}@forward"] = separate.pop(name)
            choices[name] = "kept", separate[f"{name}@forward"]
            continue
        keys: dict[Origin, str] = {"gathered": f"{name}@backward", "rerun": rerun_name(name), "moved": name + MOVED}
        origin: Origin = next((origin for origin, key in keys.items() if key in separate), "absent")
        choices[name] = origin, separate.pop(keys[origin]) if origin in keys else None
    return separate, choices


def regather_parameters(rules: GraphRules, decisions: Decisions) -> Decisions:
    """Return the same decisions with parameters gathered again in the backward half (ZeRO-3)."""
    hubs = dict(decisions.hubs)
    for node, phase in rules.first_parameter_uses:
        # The hub of a copy that both halves read has the name of the value as its key.
        if phase == "backward" and (node, "forward") in rules.first_parameter_uses and node.name in hubs:
            spec = hubs.pop(node.name)
            hubs |= {f"{node.name}@forward": spec, f"{node.name}@backward": spec}
    return replace(decisions, hubs=hubs)
