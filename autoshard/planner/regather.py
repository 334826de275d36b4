"""Values that both halves of a step use: kept, gathered again, made again, or moved to the host in between.

A tensor that is gathered for its uses in the forward half is often needed gathered in the backward half too. The copy
may be kept in between, which takes memory, or freed and made again from the shards, which takes the time of a second
gather (TensorOpt 4.2, tensor reuse; for parameters the first is ZeRO-2, the second ZeRO-3).

In the problem the forward half has a hub, whose options are specs, and the backward half has another one, whose options
are `RegatherChoice`s. Every cost depends on two variables: the tensor itself, one of the two hubs, or the operator of
the backward half that may run again, if there is one (`rerun_context.py`).
`ValueLifetimes` says which values may be gathered again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np
from torch import fx

from autoshard.capture.recomputation import rerun_name
from autoshard.patterns.decisions import Decisions
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.specs.spec import Spec

Reuse = Literal["none", "inputs", "all"]
"""Values whose copies may be gathered again: no values, inputs of the step, or activations too."""

_SMALL_FACTOR = 64  # a gathered activation so many times smaller than the largest tensor of the step is always kept


Origin = Literal["gathered", "kept", "rerun", "moved", "absent"]
"""Where the backward half has a value from: gathered again from the kept tensor; the copy of the forward half; its
operator, which runs again; the host, where the tensor was moved; or nowhere, since nothing reads it there."""

MOVED = "@moved"
"""End of the key, among hubs, of the spec in which the backward half reads a value that was moved."""

MADE_ONCE: tuple[Origin, ...] = ("gathered", "kept")
"""The origins of a value whose operator does not run again, and which the backward half needs."""


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
    """Return the options of the hub of the backward half: of every origin each spec; one where it is absent."""
    return tuple(
        RegatherChoice(spec, origin) for origin in origins for spec in (specs[:1] if origin == "absent" else specs)
    )


def tie_costs(specs: int, origins: Sequence[Origin] = MADE_ONCE) -> np.ndarray:
    """Return the costs between the two hubs of so many specs: a copy that is kept has the forward half's spec."""
    kept = np.where(np.eye(specs, dtype=bool), 0.0, np.inf)
    return np.hstack([kept if origin == "kept" else _nothing(specs, specs, origin) for origin in origins])


def _nothing(rows: int, specs: int, origin: Origin) -> np.ndarray:
    """Return the columns of an origin that has no part in a table."""
    return np.zeros((rows, 1 if origin == "absent" else specs))


@dataclass(frozen=True, slots=True, eq=False)
class RegatherEdge:
    """The edge from a tensor to the hub of the backward half.

    Attributes:
        seconds: seconds of the reshard, if the copy is made again.
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
            held in any case, as inputs of the step are.
        origins: the origins of the hub's options.
        moves: seconds of the copies of the tensor to the host and back under every spec of its own, where it may move.
    """
    read = (copied == 0) * held[:, None]  # the tensor itself is read: there is no copy
    source = (copied > 0) * held[:, None]  # kept to make the copy again
    parts = {
        "gathered": (seconds, read + source, read + copied),
        "kept": (np.zeros_like(seconds), read + copied, read + copied),
    }
    if moves is not None:
        # The device holds nothing between, and then what comes back, in the spec that is read.
        parts["moved"] = seconds + moves[:, None], np.zeros_like(seconds), read + copied
    rows, specs = seconds.shape
    tables = [parts.get(origin) or (_nothing(rows, specs, origin),) * 3 for origin in origins]
    return RegatherEdge(*(np.hstack(columns) for columns in zip(*tables, strict=True)))


def rerun_edge(seconds: np.ndarray, copied: np.ndarray, origins: Sequence[Origin]) -> tuple[np.ndarray, np.ndarray]:
    """Return the seconds and the bytes of the edge from an operator that may run again to the hub of its value.

    Args:
        seconds: seconds of the reshard from its result under every strategy (rows) to every spec of the hub (columns).
        copied: bytes of the copy; zero where both specs are the same.
        origins: the origins of the hub's options.

    Returns:
        Tables with one more row, for an operator that does not run.
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
            # One hub for both halves stands for a copy that is kept.
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
) -> tuple[dict[str, Spec], dict[str, RegatherChoice]]:
    """Return the arguments of `hubs_from_choices` for its result, given the names of the values."""
    # `separate` gets the forward hub of every name: the problem has one, also where a kept copy needs only one hub.
    separate, choices = dict(hubs), {}
    for name in names:
        kept = name in separate
        forward = separate.pop(name) if kept else separate[f"{name}@forward"]
        separate[f"{name}@forward"] = forward
        spec = forward if kept else separate.pop(f"{name}@backward")
        choices[name] = RegatherChoice(spec, "kept" if kept else "gathered")
    return separate, choices


def regather_parameters(rules: GraphRules, decisions: Decisions) -> Decisions:
    """Return the same decisions, with gathered copies of parameters made again in the backward half (ZeRO-3)."""
    hubs = dict(decisions.hubs)
    for node, phase in rules.first_parameter_uses:
        # A copy that both halves read has one hub, whose key is the name of the value.
        if phase == "backward" and (node, "forward") in rules.first_parameter_uses and node.name in hubs:
            spec = hubs.pop(node.name)
            hubs |= {f"{node.name}@forward": spec, f"{node.name}@backward": spec}
    return replace(decisions, hubs=hubs)


class ValueLifetimes:
    """Last uses of values, in positions of the program.

    Args:
        rules: the graph and its rules.
        reuse: the values that the backward half may gather again.

    Attributes:
        positions: position of every operator in the program.
        phases: `"forward"` or `"backward"` of every operator.
        inputs: the placeholders of the step.
    """

    def __init__(self, rules: GraphRules, reuse: Reuse) -> None:
        self.rules = rules
        self.reuse = reuse
        self.positions = {node: position for position, node in enumerate(rules.operators)}
        self.phases = {node: rules.graph.phase(node) for node in rules.operators}
        self.inputs = {source.node for source in rules.graph.inputs}
        self._regatherable: dict[Value, bool] = {}

    def last_use(self, node: fx.Node) -> int:
        """Return the position of the last operator that reads a result of a node, or a view of it.

        Uses that may read a copy which the backward half gathers again do not count: the memory of that choice is
        counted with the choice.
        """
        last, waiting = self.positions[node], [node]
        while waiting:
            current = waiting.pop()
            for index in range(len(self.rules.calls[current].results)):
                value = Value(current, index)
                # The storage of a view is held until its last use in any case: other views may read it.
                regathered = self.may_regather(value) and not self.is_view(value)
                for use in self.rules.uses.get(value, ()):
                    if regathered and self.phases[use.node] == "backward":
                        continue
                    last = max(last, self.positions[use.node])
                    if self.rules.rules[use.node].free:
                        waiting.append(use.node)
        return last

    def may_regather(self, value: Value) -> bool:
        """Return True if the backward half may gather a value again: both halves use it, and it is large.

        An input of the step that is never sharded has no copies; the edges of a problem show that.
        """
        if self.reuse == "none":
            return False
        if value not in self._regatherable:
            phases = {self.phases[use.node] for use in self.rules.uses.get(value, ())}
            # A value that the step returns is held through the backward half in any case.
            returned = any(output.kind != "gradient" for output in self.rules.outputs_of.get(value, ()))
            self._regatherable[value] = len(phases) == 2 and not returned and self._is_large(value)
        return self._regatherable[value]

    def may_keep_copy(self, value: Value) -> bool:
        """Return True if a copy of a value of the forward half is worth the choice of keeping it."""
        return self.reuse != "none" and self._is_large(value)

    def _is_large(self, value: Value) -> bool:
        # Copies of inputs, parameters above all, are always worth a choice. A result that is not used has no size.
        return value.node in self.inputs or (
            self.reuse == "all" and value.meta.bytes * _SMALL_FACTOR >= self._largest_bytes
        )

    def is_view(self, value: Value) -> bool:
        """Return True if the step allocates no memory for a value: an input, or a view."""
        return value.node in self.inputs or self.rules.rules[value.node].free

    @cached_property
    def _largest_bytes(self) -> int:
        return max(value.meta.bytes for value in self.rules.values())
