"""Lifetimes of values in a step, and the values that the backward half may gather again."""

from __future__ import annotations

from functools import cached_property

from torch import fx

from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.regather import Reuse

_SMALL_FACTOR = 64  # a gathered activation so many times smaller than the largest tensor of the step is always kept


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
            # A value that the step returns is held through the backward half in any case.
            phases = {self.phases[use.node] for use in self.rules.uses.get(value, ())}
            returned = any(output.kind != "gradient" for output in self.rules.outputs_of.get(value, ()))
            self._regatherable[value] = len(phases) == 2 and not returned and self._is_large(value)
        return self._regatherable[value]

    def is_view(self, value: Value) -> bool:
        """Return True if the step allocates no memory for a value: an input, or a view."""
        return value.node in self.inputs or self.rules.rules[value.node].free

    def _is_large(self, value: Value) -> bool:
        # Copies of inputs, parameters above all, are always worth a choice.
        return value.node in self.inputs or (
            self.reuse == "all" and value.meta.bytes * _SMALL_FACTOR >= self._largest_bytes
        )

    @cached_property
    def _largest_bytes(self) -> int:
        return max(value.meta.bytes for value in self.rules.values())
