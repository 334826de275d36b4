"""The moments at which a program holds a value.

Prices of memory lead to plans, and to a bound of all plans within a limit (`limit_bound.py`). Plans are found with the
memory that programs usually hold. A bound holds only if no program holds less than the counted memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import fx

from autoshard.capture.joint import JointOutput
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.regather import Reuse
from autoshard.program.fusion import is_made_apart

_SMALL_FACTOR = 64  # gathered activations so many times smaller than the largest tensor of the step are always kept

Life = tuple[int, int]
"""The first moment at which something is held, and the first at which it is no longer held."""

NEVER: Life = (0, 0)


class ValueLifetimes:
    """Moments at which programs usually hold values, in positions of the program.

    The memory of a value with its own hub for the backward half depends there on the option of the hub, and is not
    counted here. Views are of the tensor itself, not of copies, and a second operator runs at its place in the graph.

    Args:
        rules: the graph and its rules.
        reuse: the values that the backward half may gather again.
        reruns: operator of the forward half -> the operator of the backward half that may recompute it.

    Attributes:
        positions: position of every operator in the program.
        phases: `"forward"` or `"backward"` of every operator.
        inputs: the placeholders of the step.
        optional: the second operators that may be absent.
        uncertain: operators whose moments are not known.
        last: the first moment after the step.
    """

    def __init__(self, rules: GraphRules, reuse: Reuse, reruns: Mapping[fx.Node, fx.Node]) -> None:
        self.rules = rules
        self.reuse = reuse
        self.reruns = reruns
        self.optional = frozenset(reruns.values())
        self.uncertain: frozenset[fx.Node] = frozenset()
        self.positions = {node: position for position, node in enumerate(rules.operators)}
        self.phases = {node: rules.graph.phase(node) for node in rules.operators}
        self.inputs = {source.node for source in rules.graph.inputs}
        # One moment per operator, and one for the optimizer's step.
        self.last = len(rules.operators) + 1
        self._regatherable: dict[Value, bool] = {}
        outputs = (value for value, kinds in rules.outputs_of.items() if any(each.kind != "gradient" for each in kinds))
        self._returned = set(map(self._base, outputs))

    # The backward half

    def may_regather(self, value: Value) -> bool:
        """Return True if the backward half may gather a value again: both halves use it, and it is large.

        An input of the step that is never sharded has no copies, as the edges of a problem show.
        """
        if self.reuse == "none":
            return False
        if value not in self._regatherable:
            phases = {self.phases[use.node] for use in self.rules.uses.get(value, ())}
            # Outputs of the step are always held through the backward half.
            returned = self._base(value) in self._returned
            self._regatherable[value] = len(phases) == 2 and not returned and self._is_large(value)
        return self._regatherable[value]

    def may_keep_copy(self, value: Value) -> bool:
        """Return True if a copy of a value of the forward half is large enough to decide whether it is kept."""
        return self.reuse != "none" and self._is_large(value)

    def is_counted_by_hub(self, value: Value, first_use: int) -> bool:
        """Return True if a value's hub of the backward half counts the memory of the value itself.

        Args:
            value: a value with such a hub.
            first_use: the first moment at which the backward half reads it.
        """
        # A kept view that may be recomputed counts its memory. Other views always keep their tensor.
        return value.node in self.reruns or not (value.node in self.inputs or self._is_view(value))

    def hub_start(self, value: Value) -> int:
        """Return the first moment at which a value's backward hub may count its memory."""
        return self.positions.get(value.node, -1) + 1

    def is_held(self, value: Value) -> bool:
        """Return True if memory is counted for a value or its base."""
        return True

    # Lives

    def life(self, value: Value) -> Life:
        """Return the life of an operator's result, if the operator runs."""
        return self.positions[value.node], self._last_use(value) + 1

    def end_of_copy(self, reader: fx.Node) -> int:
        """Return the first moment at which a copy for an operator is no longer held."""
        # A view of a copy keeps the copy alive until the last use of the view.
        uses = [self._last_use(value) for value in self._results(reader)] if self.rules.rules[reader].free else []
        return max(uses, default=self.positions[reader]) + 1

    def end(self, value: Value) -> int:
        """Return the first moment at which a value is no longer held, but for its backward hub."""
        base = self._base(value)
        return 0 if base.node in self.inputs else self.life(base)[1]

    def end_of_output(self, output: JointOutput) -> int:
        """Return the first moment at which the step no longer holds an output."""
        # A new value is copied to its tensor after the forward half, unless the backward half needs the former value.
        is_copied = output.kind == "mutation" and output.name not in self.rules.graph.former_values
        return self._border if is_copied else self.last

    def continuation(self, value: Value) -> Life:
        """Return when a value is held longer because a view of it is used, or the step returns it."""
        return self._continuations.get(value, NEVER)

    @cached_property
    def _continuations(self) -> dict[Value, Life]:
        found: dict[Value, Life] = {}
        held: set[Value] = set()  # several views of one tensor may be returned
        for value, outputs in self.rules.outputs_of.items():
            ends = [self.end_of_output(output) for output in outputs if output.kind != "gradient"]
            base = self._base(value)
            if ends and base.node not in self.inputs and base not in held and _is_whole(value, base):
                held.add(base)
                found[value] = self.end(value), max(ends)
        return found

    def _last_use(self, value: Value) -> int:
        """Return the position of the last operator that reads a value, or a view of it.

        Uses that may read a copy gathered again in the backward half do not count.
        """
        last, waiting = self.positions[value.node], [value]
        while waiting:
            current = waiting.pop()
            # The base of a view is always held until its last use, since other views may read it.
            regathered = self.may_regather(current) and not self._is_view(current)
            for use in self.rules.uses.get(current, ()):
                if not (regathered and self.phases[use.node] == "backward"):
                    last = max(last, self.positions[use.node])
                    if self.rules.rules[use.node].free:
                        waiting += self._results(use.node)
        return last

    # Views

    def _results(self, node: fx.Node) -> list[Value]:
        return [Value(node, index) for index in range(len(self.rules.calls[node].results))]

    def _is_view(self, value: Value) -> bool:
        rules, node = self.rules, value.node
        return node not in self.inputs and rules.rules[node].free and bool(rules.operands[node])

    def _base(self, value: Value) -> Value:
        """Return the base of a view, also of a view of a view; the value itself if it is no view."""
        while self._is_view(value):
            value = self.rules.operands[value.node][0]
        return value

    # Sizes

    def _is_large(self, value: Value) -> bool:
        # Copies of inputs, mostly parameters, are always worth a decision. An unused result has no size.
        return value.node in self.inputs or (
            self.reuse == "all" and value.meta.bytes * _SMALL_FACTOR >= self._largest_bytes
        )

    @cached_property
    def _largest_bytes(self) -> int:
        return max(value.meta.bytes for value in self.rules.values())

    @cached_property
    def _border(self) -> int:
        return sum(phase == "forward" for phase in self.phases.values())


class CertainLifetimes(ValueLifetimes):
    """Moments at which every program with some decisions holds values.

    A tensor is counted up to its first use. After that, the held memory depends on the spec of the use, and is counted
    by the edges to uses. The time of a second operator depends on other recomputation: it is between its place in the
    graph and its first reader. So its operands do not count, and its result counts from the first reader on. In a
    compiled program, only results count that no kernel computes where it reads them.
    """

    def __init__(
        self, rules: GraphRules, reuse: Reuse, reruns: Mapping[fx.Node, fx.Node], compiled: bool = False
    ) -> None:
        super().__init__(rules, reuse, reruns)
        self.uncertain = self.optional
        self._compiled = compiled

    def is_held(self, value: Value) -> bool:
        node = self._storage(value).node
        if not self._compiled or node in self.inputs:
            return True
        # A product is computed together with the addition of a matrix to it.
        added = any(use.node.target is torch.ops.aten.add.Tensor for use in self.rules.uses.get(Value(node), ()))
        return is_made_apart(node.target) and not added

    def is_counted_by_hub(self, value: Value, first_use: int) -> bool:
        if not self.is_held(value):
            return False
        if self.end(value) > first_use:
            return False  # it is always held
        # Of two views that may both be recomputed, a plan can keep one.
        return value.node in self.reruns or value in self._counted_views

    def hub_start(self, value: Value) -> int:
        return self.end(value)

    def life(self, value: Value) -> Life:
        readers, start = self._readers(value), self.positions.get(value.node, -1)
        if value.node not in self.optional:
            return start, min((self.positions[reader] for reader in readers), default=start) + 1
        if not readers:
            return NEVER
        return min(self.positions[reader] for reader in readers), max(map(self.end_of_copy, readers))

    def end_of_copy(self, reader: fx.Node) -> int:
        ends = [self.life(value)[1] for value in self._results(reader)] if self.rules.rules[reader].free else []
        return max(ends, default=self.positions[reader] + 1)

    def end(self, value: Value) -> int:
        storage = self._storage(value)
        # Views of an input are often views of its copies.
        return max(map(self._end, [value] if storage.node in self.inputs else self._views[storage]))

    @cached_property
    def _continuations(self) -> dict[Value, Life]:
        # Of several views of one tensor, the one that is held longest is counted, with its bases.
        found: dict[Value, Life] = {}
        for storage, views in self._views.items():
            if storage.node in self.inputs or storage.node in self.optional:
                continue
            value = max(views, key=self._end)
            path = [value]
            while value != storage:
                value = self.rules.operands[value.node][0]
                path.append(value)
            held = self.life(storage)[1]
            for each in reversed(path):
                start, held = held, max(held, self._end(each))
                if start < held and _is_whole(each, storage):
                    found[each] = start, held
        return found

    def _readers(self, value: Value) -> list[fx.Node]:
        """Return the operators that always read a value, without those that read its backward hub."""
        # A view of an input, or of its copy, is held for the backward half in whatever spec that reads it.
        is_apart = value.node in self.inputs or self._base(value).node not in self.inputs
        has_hub = value.node in self.reruns or (is_apart and self.may_regather(value))
        return [
            use.node
            for use in self.rules.uses.get(value, ())
            if use.node not in self.optional and not (has_hub and self.phases[use.node] == "backward")
        ]

    def _end(self, value: Value) -> int:
        """Return the first moment after all reads of a value by operators, and after its return by the step."""
        outputs = (output for output in self.rules.outputs_of.get(value, ()) if output.kind != "gradient")
        ends = [*map(self.end_of_copy, self._readers(value)), *map(self.end_of_output, outputs)]
        return max([self.life(value)[1], *ends])

    def _storage(self, value: Value) -> Value:
        return self._storages.get(value, value)

    @cached_property
    def _storages(self) -> dict[Value, Value]:
        """View -> the value that owns its memory; views of a backward hub are separate from the forward half."""
        storages: dict[Value, Value] = {}
        for node in self.rules.operators:
            for value in self._results(node):
                if self._is_view(value):
                    viewed = self.rules.operands[node][0]
                    has_hub = viewed.node in self.reruns or self.may_regather(viewed)
                    if self.phases[node] == "forward" or not has_hub:
                        storages[value] = storages.get(viewed, viewed)
        return storages

    @cached_property
    def _views(self) -> dict[Value, list[Value]]:
        """Value -> itself and the views of its memory."""
        views: dict[Value, list[Value]] = defaultdict(list)
        for value in self.rules.values():
            views[self._storage(value)].append(value)
        return views

    @cached_property
    def _counted_views(self) -> set[Value]:
        """Values counted by their backward hubs: of one tensor, as many views as are together no larger than it."""
        counted: set[Value] = set()
        for storage, views in self._views.items():
            left = 0 if storage.node in self.inputs else storage.meta.bytes
            for value in views:
                if value.node not in self.reruns and self.may_regather(value) and value.meta.bytes <= left:
                    counted.add(value)
                    left -= value.meta.bytes
        return counted


def _is_whole(view: Value, base: Value) -> bool:
    """Return True if a view has no more bytes than its base; one that repeats numbers seems to have more."""
    return view.meta.bytes <= base.meta.bytes
