"""The shards of Megatron-LM's tensor parallelism, and those of expert parallelism, found in the graph of a step.

A loop is a dim of the graph, from layers that have it in their outputs (split by columns, in Megatron's terms) through
operators that keep it, such as activations and attention, to layers that sum over it (split by rows). An axis that
splits it needs no communication in between, and one reduction after the last layer. The loop over the residual stream
connects layers, too, but norms sum over it, and most layers have it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autoshard.errors import HintError
from autoshard.operators.large_losses.loss_operator import operators
from autoshard.patterns.graph_rules import GraphRules, Value
from autoshard.planner.task_graph_restrictions import is_copy, origin

_EMBEDDING = torch.ops.aten.embedding.default
_CONVOLUTION = torch.ops.aten.convolution.default
_STATISTICS = operators.logit_statistics.default
_CLASS_LOSSES = frozenset({torch.ops.aten._log_softmax.default, _STATISTICS})

Shards = dict[str, tuple[int, int]]
"""Parameter -> the dim that an axis shards, and its split factor."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of activations and a parameter.

    Attributes:
        node: the operator.
        parameter: name of the parameter.
        contracted: the factors that are summed over, major to minor.
        columns: the factors of only the parameter and the result.
        batch: the factors over several matrices, such as experts.
    """

    node: fx.Node
    parameter: str
    contracted: tuple[int, ...]
    columns: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """The layers that tensor parallelism splits.

    Attributes:
        shards: the sharded parameters.
        columns: names of the parameters of layers split by columns, including heads over a vocabulary.
        rows: names of the parameters of layers split by rows.
        embeddings: names of the tables split by entries.
    """

    shards: Shards = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    embeddings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Loop:
    """A loop from some products to others, found by `DimPropagation.follow`."""

    factors: Mapping[fx.Node, frozenset[int]]
    columns: tuple[Product, ...]
    rows: tuple[Product, ...]

    @property
    def products(self) -> set[fx.Node]:
        return {product.node for product in (*self.columns, *self.rows)}


class TensorParallelSearch:
    """Finds the layers that can be split over an axis.

    Args:
        rules: the graph and its rules.
        axis: name of the axis, for errors.
        size: number of its devices.
    """

    def __init__(self, rules: GraphRules, axis: str, size: int) -> None:
        self.rules = rules
        self.axis = axis
        self.size = size
        self.parameters = {source.node: source.name for source in rules.graph.parameters}
        self.forward = [node for node in rules.operators if rules.graph.phase(node) == "forward"]

    def tensor_parallel(self) -> TensorParallel:
        """Return the layers that Megatron-LM's tensor parallelism splits.

        Raises:
            HintError: no layer feeds another one through operators that keep the dim of its outputs, or the axis does
                not divide them.
        """
        # Loops inside of a layer have few products; without norms, those between layers have more.
        loops = sorted(self._loops(), key=lambda loop: len(loop.products))
        taken: set[fx.Node] = set()
        chosen: list[_Loop] = []
        for loop in loops:
            if taken.isdisjoint(loop.products):
                taken |= loop.products
                chosen.append(loop)
        if not chosen:
            divisor = f", or {self.axis}={self.size} does not divide them" if self.products else ""
            raise HintError(
                "no linear layer feeds another one through activations or attention alone, as in the blocks of a "
                f"transformer{divisor}."
            )
        embeddings = list(self._embeddings())
        heads = list(self._heads(taken))
        shards: Shards = {}
        for factors in (*(loop.factors for loop in chosen), *embeddings, *heads):
            shards |= self._shards_of(factors)
        column_loops = (product.parameter for loop in chosen for product in loop.columns)
        rows = dict.fromkeys(product.parameter for loop in chosen for product in loop.rows)
        tables = dict.fromkeys(name for factors in embeddings for name in self._shards_of(factors))
        head_names = (product.parameter for product in self.products for factors in heads if product.node in factors)
        return TensorParallel(shards, tuple(dict.fromkeys((*column_loops, *head_names))), tuple(rows), tuple(tables))

    def expert_parallel(self) -> Shards:
        """Return the shards of the parameters that have a matrix for every expert.

        Raises:
            HintError: there are none, or the axis does not divide the experts.
        """
        grouped = [product for product in self.products if product.batch]
        if not grouped:
            raise HintError("no parameter has a matrix for each of several experts.")
        shards: Shards = {}
        for product in grouped:
            marks = self.rules.propagation.marks((product.node, product.batch), 1, self.size)
            shards |= self._shards_of(self.rules.propagation.follow(marks))
        # A router has a column for every expert, but is no expert.
        routers = {product.parameter for product in self.products if not product.batch}
        shards = {name: shard for name, shard in shards.items() if name not in routers}
        if not shards:
            sizes = {self.rules.rules[product.node].factors[product.batch[0]].size for product in grouped}
            experts = ", ".join(map(str, sorted(sizes)))
            raise HintError(f"{self.axis}={self.size} does not divide the {experts} experts.")
        return shards

    @property
    def has_experts(self) -> bool:
        """True if there are parameters that have a matrix for each of several experts."""
        return any(product.batch for product in self.products)

    @cached_property
    def products(self) -> list[Product]:
        """The products of activations and parameters in the forward half."""
        return [product for node in self.forward for product in self._products_of(node)]

    def _products_of(self, node: fx.Node) -> Iterator[Product]:
        rule = self.rules.rules[node]
        # Not convolutions, whose channels nobody splits so; nor recurrences, which run over one dim in steps.
        if len(rule.operands) < 2 or node.target is _CONVOLUTION or any(factor.sequential for factor in rule.factors):
            return
        names = [self._parameter_of(value) for value in self.rules.operands[node]]
        held = [[factor for dim in dims for factor in dim] for dims in rule.operands]
        result = {factor for dim in rule.results[0] or () for factor in dim}
        for operand, name in enumerate(names):
            # A bias, too, is a parameter, but with one dim.
            if name is None or len(rule.operands[operand]) < 2:
                continue
            activations = {factor for other, some in enumerate(held) if names[other] is None for factor in some}
            mine = held[operand]
            contracted = tuple(factor for factor in mine if factor in activations and factor not in result)
            if not contracted:
                continue
            yield Product(
                node,
                name,
                contracted,
                tuple(factor for factor in mine if factor not in activations and factor in result),
                # Matrices of several experts have three dims.
                tuple(factor for factor in mine if (factor in activations) == (factor in result))
                if len(rule.operands[operand]) > 2
                else (),
            )

    def _parameter_of(self, value: Value) -> str | None:
        return self.parameters.get(origin(self.rules, value.node, is_copy).node)

    def _loops(self) -> Iterator[_Loop]:
        """Yield the loops from columns to rows that nothing else sums over."""
        seen: set[fx.Node] = set()  # products whose rows belong to a known loop
        for product in self.products:
            if product.node in seen:
                continue
            marks = self.rules.propagation.marks((product.node, product.contracted), 1, self.size)
            if not marks:
                continue
            factors = self.rules.propagation.follow(marks)
            touched = [each for each in self.products if each.node in factors]
            rows = tuple(each for each in touched if factors[each.node].intersection(each.contracted))
            columns = tuple(each for each in touched if factors[each.node].intersection(each.columns))
            seen.update(each.node for each in rows)
            if columns and self._is_carried(factors, {each.node for each in rows}):
                yield _Loop(factors, columns, rows)

    def _is_carried(self, factors: Mapping[fx.Node, frozenset[int]], rows: set[fx.Node]) -> bool:
        """Return True if all operators of a loop, except products `rows`, keep it without communication."""
        for node in self.forward:
            if node in factors and node not in rows:
                rule = self.rules.rules[node]
                result = {factor for dim in rule.results[0] or () for factor in dim}
                for index in factors[node]:
                    factor = rule.factors[index] if index < len(rule.factors) else None
                    if factor is None or index not in result or not factor.shardable or factor.exchanges:
                        return False
        return True

    def _embeddings(self) -> Iterator[Mapping[fx.Node, frozenset[int]]]:
        """Yield the loops over the entries of tables in which inputs of the step are looked up."""
        inputs = {source.node for source in self.rules.graph.inputs if source.kind == "input"}
        for node in self.forward:
            if node.target is _EMBEDDING:
                table, indices = self.rules.operands[node]
                # Positions, which are no input, are looked up in a table, too, but a small one.
                if self._parameter_of(table) and _index_origin(self.rules, indices.node) in inputs:
                    entries = self.rules.rules[node].operands[0][0]
                    yield self.rules.propagation.follow(self.rules.propagation.marks((node, entries), 1, self.size))

    def _heads(self, taken: set[fx.Node]) -> Iterator[Mapping[fx.Node, frozenset[int]]]:
        """Yield the loops over outputs of layers that are classes of a loss, or outputs of the model."""
        returned = {output.node for output in self.rules.graph.outputs if output.kind == "output"}
        for product in self.products:
            # The logits of a loss in pieces are inside the operator.
            in_pieces = product.node.target is _STATISTICS
            classes = self.rules.rules[product.node].indices("v") if in_pieces else product.columns
            if product.node in taken or not classes:
                continue
            marks = self.rules.propagation.marks((product.node, classes), 1, self.size)
            factors = self.rules.propagation.follow(marks)
            ends = any(node in returned or node.target in _CLASS_LOSSES for node in self.forward if node in factors)
            if ends and taken.isdisjoint(factors):
                yield factors

    def _shards_of(self, factors: Mapping[fx.Node, frozenset[int]]) -> Shards:
        """Return the shards of the parameters whose dims a loop runs over."""
        shards: Shards = {}
        for node, name in self.parameters.items():
            rule = self.rules.rules[node]
            for dim, parts in enumerate(rule.results[0] or () if node in factors else ()):
                outer = 1
                for factor in parts:
                    if factor in factors[node]:
                        shards.setdefault(name, (dim, outer))
                        break
                    outer *= int(rule.factors[factor].size)
        return shards


def _index_origin(rules: GraphRules, node: fx.Node) -> fx.Node:
    """Return the node that indices are copied from."""
    while node in rules.calls and is_copy(rules, node) and len(rules.operands[node]) == 1:
        node = rules.operands[node][0].node
    return node


def glob_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names with `*` in place of numbers, each once."""
    parts = (name.split(".") for name in names)
    return tuple(dict.fromkeys(".".join("*" if part.isdigit() else part for part in some) for some in parts))
