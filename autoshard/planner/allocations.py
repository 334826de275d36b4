"""What one device holds during a step, and when."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from autoshard.memory.footprint import Allocation, Kind
from autoshard.patterns.graph import Use, Value, operand_nodes, value_of
from autoshard.planner.account import Account
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec

_AT_REST: dict[str, Kind] = {"parameter": "parameter", "buffer": "buffer", "constant": "buffer"}


def allocations(account: Account) -> Iterator[Allocation]:
    """What one device holds and when, in positions of the program: at rest, made by operators, copied by reshards.

    A tensor lives from the operator that makes it to the last one that reads it or a view of it; a gradient lives on
    to the end of the step. Saved activations are tensors that the backward half reads.
    """
    return _Holdings(account).run()


class _Holdings:
    """One pass over an account."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.flow = account.flow
        self.rules = account.rules
        self.end = len(self.rules.operators) + 1
        self.views: dict[str, list[Value]] = defaultdict(list)  # key of a value or copy -> what is a view of it
        for node in self.rules.operators:
            if self.rules.rules[node].free:
                results = range(len(self.rules.calls[node].results))
                self.views[account.read[Use(node, 0)]] += [Value(node, index) for index in results]
        self.gradients: dict[str, str] = {}  # key of a value or copy -> the gradient that it is
        self.clones: list[Allocation] = []  # gradients that would share the memory of another tensor
        self._find_gradients()

    def run(self) -> Iterator[Allocation]:
        yield from self._at_rest()
        for node in self.rules.operators:
            if not self.rules.rules[node].free:
                for index, meta in enumerate(self.rules.calls[node].results):
                    if meta is not None:
                        value = Value(node, index)
                        held, start = self._bytes(value, self.flow.produced(value)), self.account.position[node]
                        yield self._passing(value.name, held, start, "activation")
        for leg in self.account.legs:
            kind: Kind = "gathered" if leg.value.node.op == "placeholder" else "activation"
            yield self._passing(leg.key, self._bytes(leg.value, leg.path.target), leg.position, kind)
        yield from self.clones

    def _find_gradients(self) -> None:
        for output, key in self.account.handed.items():
            if output.kind == "gradient" and output.node is not None:
                value = value_of(output.node)
                root = self._memory_of(value) if key == value.name else key
                if root is None or root in self.gradients:
                    held = self._bytes(value, self.flow.delivered(output))
                    start = self.account.position.get(value.node, 0)
                    self.clones.append(Allocation(output.name, held, start, self.end, "gradient"))
                else:
                    self.gradients[root] = output.name

    def _memory_of(self, value: Value) -> str | None:
        """Key of the value or copy in whose memory a value lies; None for an input of the step."""
        while value.node in self.account.position and self.rules.rules[value.node].free:
            source = value_of(next(operand_nodes(value.node)))
            key = self.account.read[Use(value.node, 0)]
            if key != source.name:
                return key
            value = source
        return value.name if value.node in self.account.position else None

    def _at_rest(self) -> Iterator[Allocation]:
        trained = {output.name for output in self.account.handed if output.kind == "gradient"}
        for source in self.flow.graph.inputs:
            value = Value(source.node)
            held = self._bytes(value, self.flow.produced(value))
            yield Allocation(source.name, held, 0, self.end, _AT_REST.get(source.kind, "temporary"))
            if source.kind == "parameter" and source.name in trained:
                state = int(held // value.meta.dtype.itemsize * self.account.state_bytes)
                yield Allocation(source.name, state, 0, self.end, "optimizer")

    def _passing(self, key: str, held: int, start: int, kind: Kind) -> Allocation:
        """A tensor that the step makes: until its last use, or, if it is a gradient, until the end."""
        if key in self.gradients:
            return Allocation(self.gradients[key], held, start, self.end, "gradient")
        return Allocation(key, held, start, max(start, self._last_read(key)) + 1, kind)

    def _last_read(self, key: str) -> int:
        """Last position at which a tensor or a view of it is read, or handed back."""
        last, waiting = 0, [key]
        while waiting:
            current = waiting.pop()
            last = max(last, self.account.last_use.get(current, 0))
            waiting += [view.name for view in self.views.get(current, ())]
        return last

    def _bytes(self, value: Value, spec: Spec) -> int:
        meta = value.meta
        return math.prod(local_shape(meta.shape, spec, self.account.mesh)) * meta.dtype.itemsize
