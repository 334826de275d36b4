"""The rules of a whole joint graph: every operator's factors, split where a view of the graph splits them."""

from __future__ import annotations

import copy
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.distributed.tensor import Placement, Replicate
from torch.utils import _pytree as pytree

from autoshard.capture.joint import JointGraph, JointOutput
from autoshard.capture.mixed_precision import REDUCED
from autoshard.capture.nodes import is_random
from autoshard.capture.recomputation import PREPARATIONS, RECOMPUTES, parameter_layers
from autoshard.errors import HintError, InputError, reason_of
from autoshard.operator_library import SEEDS
from autoshard.patterns.borrowed import batch_rule, whole_rule
from autoshard.patterns.graph_variants import with_variants
from autoshard.patterns.ops.view import with_merged_dims
from autoshard.patterns.padding import zero_padded_results
from autoshard.patterns.propagation import CutPropagation, DimFactors, DimPart, DimPropagation, useful_cuts
from autoshard.patterns.registry import op_call, rule_for, tensor_meta
from autoshard.patterns.rule import Dims, Factor, OpCall, Rule, TensorMeta, refine
from autoshard.patterns.strategy import offered_factors
from autoshard.size import DynamicSize, Sizes, at, evaluate, is_dynamic
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import names_with_batch
from autoshard.specs.layout import canonical, is_placeable
from autoshard.specs.spec import Spec, placement_text

_ADD = torch.ops.aten.add.Tensor
_VIEWS = frozenset({torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default})


class Value(NamedTuple):
    """One tensor of the graph: a result of a node, or a placeholder."""

    node: fx.Node
    result: int = 0

    @property
    def name(self) -> str:
        return self.node.name if self.result == 0 else f"{self.node.name}:{self.result}"

    @property
    def meta(self) -> TensorMeta:
        """Global shape and dtype."""
        return tensor_meta(self.node, self.result)


class Use(NamedTuple):
    """One operand of one operator."""

    node: fx.Node
    operand: int


def value_of(node: fx.Node) -> Value:
    """The tensor that an FX node stands for: `getitem` is a result of its operand."""
    if node.op == "call_function" and node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        return Value(source, index)
    return Value(node)


def uncast(node: fx.Node) -> fx.Node:
    """The node before any dtype casts: mixed precision casts parameters."""
    while node.target is torch.ops.aten._to_copy.default:
        (node,) = node.all_input_nodes
    return node


def operand_nodes(node: fx.Node) -> Iterator[fx.Node]:
    """The FX nodes that are tensor operands of a call, in the order of `OpCall.operands`."""
    yield from _tensors_in(node.args)
    if node.kwargs:
        yield from _tensors_in(node.kwargs.values())


def _tensors_in(arguments: Iterable[Any]) -> Iterator[fx.Node]:
    for argument in arguments:
        if isinstance(argument, fx.Node):
            if isinstance(argument.meta["val"], torch.Tensor):
                yield argument
        elif isinstance(argument, (tuple, list)):
            yield from _tensors_in(argument)
        elif isinstance(argument, dict):
            yield from _tensors_in(argument.values())


class GraphRules:
    """Operators, tensors and refined rules of one joint graph.

    Attributes:
        graph: the joint graph.
        operators: the nodes that compute, without `getitem`, in execution order: forward first.
        calls: the call of each operator.
        rules: the rule of each operator, refined by the cuts that propagate through the graph.
        generic: values for dynamic sizes that no axis divides and that equal no other size of the graph, so that rules
            do not depend on the example's values.
        unknown: names of operators without a rule, which are replicated, and how often they are called.
        batch_rules: for each of them, the text of a rule that would split its batch if samples are independent; empty
            where no dim looks like one of samples.
        uses: for every value, where it is used.
        outputs_of: for every value that the step returns, the outputs that it is.

    Args:
        graph: the joint graph.
        mesh: the mesh axes, whose sizes tell which cuts are useful.
    """

    def __init__(self, graph: JointGraph, mesh: MeshShape) -> None:
        self.graph = graph
        calls = (node for node in graph.graph.nodes if node.op == "call_function")
        computing = (node for node in calls if node.target is not operator.getitem)
        self.operators: tuple[fx.Node, ...] = tuple(sorted(computing, key=lambda node: graph.phase(node) == "backward"))
        # Equal calls are one object, so that work is done once.
        interned: dict[OpCall, OpCall] = {}
        self.generic: Sizes = {} if graph.dynamic is None else generic_sizes(graph, mesh)
        known: dict[fx.Node, Any] = {}
        calls_of = ((node, at(op_call(node, known), self.generic)) for node in self.operators)
        self.calls = {node: interned.setdefault(call, call) for node, call in calls_of}
        self.unknown: dict[str, int] = {}
        self.batch_rules: dict[str, str] = {}
        self._pin_specs: dict[tuple[fx.Node, MeshShape], Spec] = {}
        merged: dict[OpCall, Rule] = {}  # equal calls share one rule
        plain = {}
        for node in self.operators:
            rule, call = self._plain_rule(node), self.calls[node]
            if call.op in _VIEWS and self.graph.pin(node) is None:
                rule = merged.setdefault(call, with_merged_dims(rule, call, mesh))
            plain[node] = rule
        for source in graph.inputs:
            plain[source.node] = _tensor_rule(at(Value(source.node).meta, self.generic))
        # Cuts propagate through variants, too, so add these first.
        plain = with_variants(plain, self.calls, self.operands, self.outputs_of)
        cuts = useful_cuts(CutPropagation(self.dims(plain), plain, self._input_cuts()).solve(), plain, mesh)
        # By identity: rules are shared already, and comparing them is slow.
        refined: dict[tuple[int, tuple[Any, ...]], Rule] = {}
        self.rules: dict[fx.Node, Rule] = {}
        for node, rule in plain.items():
            chains = tuple(sorted(cuts.get(node, {}).items()))
            key = (id(rule), chains)
            if key not in refined:
                refined[key] = refine(rule, dict(chains))
            self.rules[node] = refined[key]
        if graph.dynamic is not None:
            self._substitute_sizes(graph.dynamic.example)

    def reuse_from(self, other: GraphRules) -> None:
        """Replace calls and rules by equal objects of another graph, so that cached results serve both.

        Args:
            other: the calls and rules of another graph on the same mesh.
        """
        calls = {call: call for call in other.calls.values()}
        rules = {_rule_key(rule): rule for rule in other.rules.values()}
        shared = {id(rule): rules.get(_rule_key(rule), rule) for rule in self.rules.values()}
        self.calls = {node: calls.get(call, call) for node, call in self.calls.items()}
        self.rules = {node: shared[id(rule)] for node, rule in self.rules.items()}

    def at(self, sizes: Sizes) -> GraphRules:
        """The same calls and rules with dynamic sizes taken at `sizes`."""
        rules = copy.copy(self)
        rules._substitute_sizes(sizes)
        return rules

    def _substitute_sizes(self, sizes: Sizes) -> None:
        """Substitute all dynamic sizes; what was one object stays one."""
        substituted: dict[int, Any] = {}
        for each in (*self.calls.values(), *self.rules.values()):
            substituted.setdefault(id(each), at(each, sizes))
        self.calls = {node: substituted[id(call)] for node, call in self.calls.items()}
        self.rules = {node: substituted[id(rule)] for node, rule in self.rules.items()}
        # Cached results hold for the former sizes only.
        for name in ("propagation", "_routed_propagation"):
            self.__dict__.pop(name, None)

    def pin_spec(self, node: fx.Node, mesh: MeshShape) -> Spec | None:
        """The spec that the user pinned this node to with `autoshard.shard`, if any.

        Raises:
            HintError: the placements do not fit the tensor or the mesh.
        """
        if node not in self._pins:
            return None
        key = (node, mesh)
        if key not in self._pin_specs:
            where = self.graph.module_path(node)
            self._pin_specs[key] = pinned_spec(self._pins[node], Value(node).meta.shape, mesh, where)
        return self._pin_specs[key]

    @cached_property
    def parameter_layers(self) -> dict[str, str]:
        """The layer that every parameter belongs to."""
        return parameter_layers(self.graph)

    @cached_property
    def first_parameter_uses(self) -> dict[tuple[fx.Node, str], int]:
        """The first operator of each half that computes with a parameter.

        Keys are nodes of parameters, or of values made from one parameter by `PREPARATIONS`, with `"forward"` or
        `"backward"`; values are indices of operators.
        """
        prepared = {source.node for source in self.graph.inputs if source.kind == "parameter"}
        for node in self.operators:
            if node.target in PREPARATIONS and prepared.issuperset(value.node for value in self.operands[node]):
                prepared.add(node)
        needs: dict[tuple[fx.Node, str], int] = {}
        # Reversed: results before their producers.
        for number, node in reversed(tuple(enumerate(self.operators))):
            passed = {half: needs[node, half] for half in ("forward", "backward") if (node, half) in needs}
            first = passed if node in prepared else {self.graph.phase(node): number}
            for value in self.operands[node]:
                if value.node in prepared:
                    for half, moment in first.items():
                        needs[value.node, half] = min(moment, needs.get((value.node, half), moment))
        return needs

    @cached_property
    def _pins(self) -> dict[fx.Node, tuple[Placement, ...]]:
        pins = ((node, self.graph.pin(node)) for node in self.operators)
        return {node: placements for node, placements in pins if placements is not None}

    def original_draw(self, node: fx.Node) -> fx.Node | None:
        """The random operator of the forward half that this operator reruns, if it is such a rerun."""
        if RECOMPUTES not in node.meta or not is_random(node):
            return None
        call = self.calls[node]
        # Attention without dropout draws nothing.
        if "dropout_p" in call.argument_names and call.arg("dropout_p") == 0:
            return None
        return self._by_name.get(node.meta[RECOMPUTES])

    def first_with_seed(self, node: fx.Node) -> fx.Node | None:
        """The first attention with the same dropout seed: it drops the same weights if split in the same way."""
        return self._by_seed.get(node)

    @cached_property
    def _by_seed(self) -> dict[fx.Node, fx.Node]:
        first: dict[str, fx.Node] = {}
        shared: dict[fx.Node, fx.Node] = {}
        for seed in self.operators:
            if seed.target in SEEDS:
                drawn = first.setdefault(seed.meta.get(RECOMPUTES, seed.name), next(iter(seed.users)))
                shared |= {user: drawn for user in seed.users if user is not drawn}
        return shared

    @cached_property
    def _by_name(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.operators}

    def _input_cuts(self) -> dict[fx.Node, dict[int, tuple[int, ...]]]:
        """Return the cuts of dims of placeholders that do not come from views."""
        cuts = {} if self.graph.dynamic is None else self.graph.dynamic.cuts
        return {
            source.node: {
                dim: tuple(DynamicSize.of(size, self.generic) for size in sizes)
                for dim, sizes in cuts[source.node.name].items()
            }
            for source in self.graph.inputs
            if source.node.name in cuts
        }

    def _plain_rule(self, node: fx.Node) -> Rule:
        call = self.calls[node]
        if self.graph.pin(node) is not None:
            at_rest = _tensor_rule(at(Value(node).meta, self.generic))
            assert at_rest.results[0] is not None
            return replace(at_rest, operands=(at_rest.results[0],))
        rule = rule_for(call)
        if rule is None:
            self.unknown[str(call.op)] = self.unknown.get(str(call.op), 0) + 1
            self.batch_rules.setdefault(str(call.op), batch_rule(call))
            return whole_rule(call)
        return rule

    @cached_property
    def zeros(self) -> dict[fx.Node, tuple[bool, ...]]:
        """For every operator, which operands have zeros in their padding however they are sharded.

        Inputs of the step are padded with zeros, and so are slices of a larger tensor.
        """
        known = {Value(source.node) for source in self.graph.inputs}
        by_node: dict[fx.Node, tuple[bool, ...]] = {}
        for node in self.operators:
            by_node[node] = zeros = tuple(value in known for value in self.operands[node])
            rule = self.rules[node]
            variants = [zero_padded_results(each, range(len(each.factors)), zeros) for each in (rule, *rule.variants)]
            known |= {Value(node, index) for index, kept in enumerate(zip(*variants, strict=True)) if all(kept)}
        return by_node

    @cached_property
    def unreduced(self) -> frozenset[Value]:
        """Values on the way to a gradient whose partial sums are reduced later, in another dtype."""
        partial: set[Value] = set()
        waiting = [node for node in self.operators if node.meta.get(REDUCED) == "here"]
        while waiting:
            for value in self.operands[waiting.pop()]:
                if value.node in self.rules and len(self.uses[value]) == 1 and value not in self.outputs_of:
                    partial.add(value)
                    if value.node in self.calls and (self.rules[value.node].free or self.calls[value.node].op is _ADD):
                        waiting.append(value.node)
        return frozenset(partial)

    def restores_dtype(self, node: fx.Node) -> bool:
        """Return True if an operator casts a gradient back after its reduction in another dtype."""
        return bool(node.meta.get(REDUCED) == "before")

    @cached_property
    def uses(self) -> dict[Value, list[Use]]:
        uses: dict[Value, list[Use]] = defaultdict(list)
        for node in self.operators:
            for operand, value in enumerate(self.operands[node]):
                uses[value].append(Use(node, operand))
        return dict(uses)

    @cached_property
    def outputs_of(self) -> dict[Value, list[JointOutput]]:
        outputs: dict[Value, list[JointOutput]] = defaultdict(list)
        for output in self.graph.outputs:
            if output.node is not None:
                outputs[value_of(output.node)].append(output)
        return dict(outputs)

    @cached_property
    def operands(self) -> dict[fx.Node, tuple[Value, ...]]:
        """The tensors that every operator takes, in the order of `OpCall.operands`."""
        return {node: tuple(map(value_of, operand_nodes(node))) for node in self.operators}

    def batch_factors(self) -> dict[fx.Node, frozenset[int]]:
        """Return, for every operator, the factors whose sharding splits the batch.

        The batch is the first dim of the inputs whose first dim has the most common size. It is followed through dims
        of the same factor, views, results and gradients, up to where it is summed. A factor with the batch outermost
        (rows of a flattened batch of sequences) counts, since its blocks are of whole samples first. A factor with the
        batch further inside does not.

        Source: Whale 3.1.2: each replica consumes its part of the mini-batch.
        """
        return self.factors_along(DimPart(node, 0) for node in self.batch_inputs())

    def batch_inputs(self) -> list[fx.Node]:
        """Return the inputs whose first dim is the batch."""
        inputs = {source.name: source.node for source in self.graph.inputs if source.kind == "input"}
        names = names_with_batch({name: Value(node).meta.shape for name, node in inputs.items()})
        return [node for name, node in inputs.items() if name in names]

    def batch_dims(self, nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
        """Return the batch dim of every node that has one: the dim in which the batch is outermost."""
        factors, dims = self.batch_factors(), dict[fx.Node, int]()
        for node in nodes:
            value = value_of(node)
            batch = factors.get(value.node, frozenset())
            for dim, parts in enumerate(self.rules[value.node].results[value.result] or ()):
                if parts and parts[0] in batch:
                    dims.setdefault(node, dim)
        return dims

    def factors_along(self, parts: Iterable[DimPart]) -> dict[fx.Node, frozenset[int]]:
        """Return, for every operator, the offered factors that have one of these parts of dims outermost."""
        parts = list(parts)
        found = self.propagation.solve(parts)
        if self._routed_propagation is None:
            return found
        # Rows sent to groups have other loops.
        for node, factors in self._routed_propagation.solve(parts).items():
            variant, offered = self._routed_propagation.rules[node], offered_factors(self.rules[node])
            names = {variant.factors[factor].name for factor in factors}
            also = (index for index, factor in enumerate(offered) if factor.name in names)
            found[node] = found.get(node, frozenset()).union(also)
        return found

    @cached_property
    def propagation(self) -> DimPropagation:
        """The propagation of dims through the graph."""
        return DimPropagation(self.dims(), self.rules)

    @cached_property
    def _routed_propagation(self) -> DimPropagation | None:
        """The propagation along rows that are sent to groups; None if there are none."""
        variants = {
            node: variant
            for node, rule in self.rules.items()
            for variant in rule.variants
            if any(factor.routed for factor in variant.factors)
        }
        if not variants:
            return None
        rules = {**self.rules, **variants}
        return DimPropagation(self.dims(rules), rules)

    def dims(self, rules: Mapping[fx.Node, Rule] | None = None) -> Iterator[list[DimFactors]]:
        """Yield, for every dim of every tensor, its factors in the rule of each operator that touches it.

        Args:
            rules: rules of all nodes; by default the refined ones.

        Yields:
            The operators, each with the dim's factors in its rule, major to minor.
        """
        rules = self.rules if rules is None else rules
        gradients: dict[fx.Node, list[Value]] = defaultdict(list)
        inputs = {source.name: source.node for source in self.graph.inputs if source.kind != "tangent"}
        for output in self.graph.outputs:
            if output.kind == "gradient" and output.node is not None:
                gradients[inputs[output.name]].append(value_of(output.node))
        for value in self.values():
            known = [(node, dims) for node, dims in self.descriptions(value, gradients, rules) if dims is not None]
            for dim in range(max((len(dims) for _, dims in known), default=0)):
                yield [(node, dims[dim]) for node, dims in known if dims[dim]]

    def descriptions(
        self,
        value: Value,
        partners: Mapping[fx.Node, Sequence[Value]],
        rules: Mapping[fx.Node, Rule] | None = None,
    ) -> list[tuple[fx.Node, Dims | None]]:
        """Return the dims of a value in the rules of its producer, its users and the producers of its partners.

        Args:
            value: the tensor.
            partners: for inputs of the step, values with the same dims that are returned for them, such as gradients.
            rules: rules of all nodes; by default the refined ones.
        """
        rules = self.rules if rules is None else rules
        results = [value, *partners.get(value.node, ())]
        maker, *others = ((each.node, rules[each.node].results[each.result]) for each in results)
        return [
            maker,
            *((use.node, rules[use.node].operands[use.operand]) for use in self.uses.get(value, ())),
            *others,
        ]

    def values(self) -> Iterator[Value]:
        """Every tensor of the graph: placeholders, then results in order."""
        for source in self.graph.inputs:
            yield Value(source.node)
        for node in self.operators:
            for index, meta in enumerate(self.calls[node].results):
                if meta is not None:
                    yield Value(node, index)


def pinned_spec(placements: Sequence[Placement], shape: tuple[int, ...], mesh: MeshShape, where: str) -> Spec:
    """The spec that `autoshard.shard(x, *placements)` asks for; axes that are not named stay replicated.

    Raises:
        HintError: more placements than axes, a dim out of range, or a dim that several axes, or strides, do not divide.
    """
    said = f"autoshard.shard(x, {', '.join(map(placement_text, placements))}) in {where or 'the root module'}"
    if len(placements) > mesh.ndim:
        raise HintError(f"{said} names {len(placements)} placements, but the mesh has the axes {mesh}.")
    try:
        spec = canonical(shape, Spec.of(*placements, *[Replicate()] * (mesh.ndim - len(placements))), mesh)
    except ValueError as error:
        raise HintError(f"{said} does not fit a tensor of shape {list(shape)}: {reason_of(error)}") from error
    if not is_placeable(shape, spec, mesh):
        raise HintError(
            f"{said} does not divide a tensor of shape {list(shape)} evenly over the mesh {mesh}: choose a dim that "
            "the axes divide, or a plain Shard of a dim that no other axis shards, which need not be divided."
        )
    return spec


def _rule_key(rule: Rule) -> tuple[object, ...]:
    """Return a key of a rule with its local programs, which equality ignores."""
    return rule, rule.local, *(variant.local for variant in rule.variants)


def _tensor_rule(meta: TensorMeta) -> Rule:
    """The rule of a tensor at rest: a result with one factor per dim."""
    factors = tuple(Factor(f"d{dim}", size, uneven=True) for dim, size in enumerate(meta.shape))
    dims = tuple((dim,) if size > 1 else () for dim, size in enumerate(meta.shape))
    return Rule(factors, (), (dims,), free=True)


# Generic sizes: values of dynamic sizes that represent all others.


_TRIES = 4096  # values for each symbol


def generic_sizes(graph: JointGraph, mesh: MeshShape, other_than: Sizes | None = None) -> Sizes:
    """Values for the symbols of a graph, near the example's, without accidental equalities.

    No mesh axis divides them, and no static size of the graph equals them, so that a program made for them treats no
    sizes as equal or even that are not at other values.

    Args:
        graph: a graph with dynamic sizes.
        mesh: the mesh axes.
        other_than: values to avoid where possible.

    Raises:
        InputError: the range in which the graph holds has no such value.
    """
    avoided = other_than or {}
    dynamic = graph.dynamic
    assert dynamic is not None
    static = {
        size
        for node in graph.graph.nodes
        for tensor in pytree.tree_leaves(node.meta.get("sizes", node.meta.get("val")))
        for size in (tensor.shape if isinstance(tensor, torch.Tensor) else (tensor,))
        if not is_dynamic(size)
    }
    shapes = [expr for dims in dynamic.dims.values() for expr in dims.values()]
    values = dict(dynamic.example)
    # One at a time, near the example's value: the range of one may depend on the others.
    for name in values:
        low, high = dynamic.ranges[name]
        for value in itertools.islice(_near(max(values[name], 2 * mesh.size + 1), low, high), _TRIES):
            candidate = values | {name: value}
            others = {values[other] for other in values if other != name}
            sizes = {int(evaluate(expr, candidate)) for expr in shapes if name in expr.free_symbols}
            alone = math.gcd(value, mesh.size) == 1 and not sizes & (static | others) and value != avoided.get(name)
            if alone and dynamic.serves(candidate):
                values = candidate
                break
        else:
            # Avoid the value only if there is another one.
            if name in avoided:
                values = values | {name: avoided[name]}
                continue
            raise InputError(
                f'dynamic: no size of "{name}" from {low} to {"any" if high is None else high} can stand for all '
                f"others on the mesh {mesh}: one that no axis divides and that no other size of the model equals. "
                f'Leave "{name}" out of dynamic, so that every size is planned by itself.'
            )
    return values


def _near(start: int, low: int, high: int | None) -> Iterator[int]:
    """Numbers from `low` to `high`: first upwards from `start`, then downwards below it."""
    above = itertools.count(start) if high is None else range(start, high + 1)
    return itertools.chain(above, range(min(start, start if high is None else high), low - 1, -1))
