"""`capture_microbatch`: the step of a module with one microbatch, and the operators of `forward` that make up stages.

A node of the backward half belongs to the operator whose derivative it computes: it is found between the gradients of
the operator's results and those of its operands.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard import operators as operators  # what captures put into graphs
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.capture_errors import node_line
from autoshard.capture.dynamic import Dynamic
from autoshard.capture.export import Exported
from autoshard.capture.joint import CaptureOptions, capture_marked
from autoshard.capture.joint_graph import JointGraph, JointInput, fingerprint
from autoshard.capture.marks import TaskGraph, defaults_of, mark_defaults
from autoshard.capture.nodes import is_random
from autoshard.capture.python.called_code import PythonCall
from autoshard.capture.step_marks import GRADIENT_OF, MarkedStep, operator_of, tensor_name, value_number
from autoshard.errors import CaptureError
from autoshard.pipeline.graph.stage_graph import strongly_connected_components

aten = torch.ops.aten

# Keys of a node's meta: its place in the model, and its task graph.
_PLACE = ("nn_module_stack", "custom")


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOperator:
    """An operator of the forward graph.

    Attributes:
        name: of its node there.
        nodes: that it runs in the forward half of the step.
        backward: the nodes of its derivative, without additions of gradients.
    """

    name: str
    nodes: tuple[fx.Node, ...]
    backward: tuple[fx.Node, ...]


@dataclass(frozen=True, eq=False)
class MicrobatchStep:
    """The step of a module with one microbatch, before it is simplified.

    Attributes:
        module: the module, whose parameters and buffers the stages will hold.
        marked: the step with its marks.
        operators: of the forward graph, in topological order; those that run nothing are left out.
        owners: for every node of the step, the positions of its operators: one for most; several for a constant that
            serves several derivatives; none for additions and marks of gradients.
        sums: nodes that add up gradients of a value which several operators read.
        together: groups of names of operators that must run on one stage: those that read or change a buffer that is
            changed, and those whose derivatives can't be parted.
        changing: names of the operators that read or change a tensor which the step changes.
        forward_fingerprint: a hash of the forward graph that is the same on all ranks and in all runs.
        contributions: for every mark, what is added up in its gradient, each with the position of the operator whose
            derivative it is of; None for the gradient of an output.
        mp_policy: the precisions of the step.
        slices: the stages that were cut, by what they run and exchange: equal ones are one object.
    """

    module: nn.Module
    marked: MarkedStep
    operators: tuple[ForwardOperator, ...]
    owners: Mapping[fx.Node, frozenset[int]]
    sums: frozenset[fx.Node]
    together: tuple[tuple[str, ...], ...]
    changing: frozenset[str]
    forward_fingerprint: str
    contributions: Mapping[fx.Node, tuple[tuple[fx.Node, int | None], ...]]
    mp_policy: MixedPrecisionPolicy | None = None
    slices: dict[Hashable, Any] = field(default_factory=dict)

    @property
    def exported(self) -> Exported:
        """The forward graph, and the layouts of calls and results."""
        return self.marked.exported

    @property
    def joint(self) -> JointGraph:
        """The step."""
        return self.marked.joint

    @cached_property
    def sources(self) -> dict[fx.Node, JointInput]:
        """The inputs of the step, by their placeholders."""
        return {item.node: item for item in self.joint.inputs}

    @cached_property
    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes of the module's outputs, in order."""
        return tuple(value_of(item.node) for item in self.joint.outputs if item.kind == "output" and item.node)

    @cached_property
    def gradients(self) -> dict[fx.Node, list[fx.Node]]:
        """For every value, the marks behind its gradients: more than one if autograd knows it by several names."""
        marks: dict[fx.Node, list[fx.Node]] = {}
        values = self.marked.values
        for mark in self.joint.graph.find_nodes(op="call_function", target=GRADIENT_OF):
            if value_number(mark) in values:
                marks.setdefault(values[value_number(mark)], []).append(mark)
        return marks

    @cached_property
    def tensors(self) -> frozenset[str]:
        """Names of the tensors of the forward half."""
        return frozenset(tensor_name(node) for each in self.operators for node in each.nodes)

    @cached_property
    def random(self) -> frozenset[str]:
        """Names of the operators that may draw random numbers."""
        return frozenset(each.name for each in self.operators if any(map(is_random, each.nodes)))

    def owner(self, node: fx.Node) -> int | None:
        """Return the position of the operator of a node of the forward half; None for placeholders."""
        return next(iter(self.owners.get(node, ())), None)


def value_of(node: fx.Node) -> fx.Node:
    """Return the node of `forward` that an output stands for: behind it, the trace detaches and copies outputs."""
    while operator_of(node) is None and node.target in (aten.detach.default, aten.clone.default):
        node = node.all_input_nodes[0]
    return node


def capture_microbatch(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    grad: bool = True,
    task_graphs: Mapping[str, TaskGraph] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    dynamic: Dynamic | None = None,
    mark: Callable[[fx.Graph], None] = lambda graph: None,
) -> MicrobatchStep:
    """Capture one call of a module for a pipeline. Weights are neither changed nor copied.

    The step is of the sizes of this call, and of the module's training or evaluation mode. Stages run one microbatch at
    a time: pass the tensors of one microbatch (see `microbatches`).

    Args:
        module: the module; it may be on the meta device.
        args: positional arguments of a call with one microbatch; real, meta or fake tensors, and plain values.
        kwargs: keyword arguments of that call.
        grad: True if gradients will be wanted.
        task_graphs: hints for modules by their paths; they have precedence over the modules' defaults.
        mp_policy: precisions of parameters, inputs and outputs, as casts in the graph. Every operator that reads a
            parameter has a cast of its own, so that its stage needs no other stage's.
        dynamic: dims of inputs that are dynamic sizes, as in `capture`.
        mark: called with the forward graph, to mark its nodes.

    Raises:
        CaptureError: the module cannot be captured as one graph; the message names the line of the user's code.
        InputError: an argument is of a type that cannot be part of a signature.
    """

    fingerprints = []

    def prepare(exported: Exported) -> None:
        _refuse_reads(exported)
        _refuse_kept(exported)
        _refuse_hooks(exported)
        _split_casts(exported)
        mark_defaults(exported.graph, {**defaults_of(module), **(task_graphs or {})})
        mark(exported.graph)
        fingerprints.append(fingerprint(exported.inputs, (), exported.graph))  # before the trace changes outputs

    call = BoundCall.of(module, args, kwargs, grad)
    marked = capture_marked(call, CaptureOptions(dynamic=dynamic, mp_policy=mp_policy), prepare)
    return replace(_OperatorFinder(module, marked).read(), mp_policy=mp_policy, forward_fingerprint=fingerprints[-1])


def _refuse_kept(exported: Exported) -> None:
    """Refuse a `forward` that leaves tensors in attributes, containers or variables."""
    kept = {attribute.name for attribute in exported.result.attributes}
    for name, node in zip(exported.result.names, exported.outputs, strict=True):
        if name in kept:
            changed = (change.line for change in exported.state.mutations if name.startswith(change.path))
            raise CaptureError(
                f"{next(changed, '') or node_line(node)} keeps a tensor ({name}), which no pipeline does: one rank "
                "computes it, one microbatch after another. Return it from forward, or have no pipeline axis."
            )


def _refuse_reads(exported: Exported) -> None:
    """Refuse a `forward` whose program depends on the numbers in tensors: every call would have to read them first."""
    lines = [reading.line for reading in exported.state.conditions.readings]
    lines += [check.line for check in exported.result.checks]
    if lines:
        raise CaptureError(
            f"{lines[0]} asks for the numbers in a tensor, which no pipeline does: its stages run one program each. "
            "Take the question out of forward, write the branch as torch.where, or use a mesh without a pipeline axis."
        )


def _refuse_hooks(exported: Exported) -> None:
    """Refuse a hook that `forward` sets on a parameter or input: it would see the gradient of one microbatch."""
    for node in exported.graph.nodes:
        call = node.target
        if isinstance(call, PythonCall) and call.history and call.has_effect and node.args[0][0].op == "placeholder":
            raise CaptureError(
                f"{call.__name__} at {call.where} is on a parameter or an input of the model, and a pipeline adds "
                "up its gradient over microbatches. Set it on the parameter outside of forward, or use a mesh without "
                "a pipeline axis."
            )


def _split_casts(exported: Exported) -> None:
    """Give every operator that reads the cast of a parameter a cast of its own."""
    graph = exported.graph
    for node, source in exported.placeholders.items():
        for cast in [user for user in node.users if source.kind == "parameter" and is_cast(user)]:
            # The first reader keeps the cast that there is.
            for user in [user for user in cast.users if user.op != "output"][1:]:
                with graph.inserting_before(user):
                    copy = graph.node_copy(cast)
                copy.meta = {**cast.meta, **{key: user.meta[key] for key in _PLACE if key in user.meta}}
                user.replace_input_with(cast, copy)


def is_cast(node: fx.Node) -> bool:
    """Return True if the node is its operand in another dtype."""
    return node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}


class _OperatorFinder:
    """One pass over a marked step that finds the operators of its nodes."""

    def __init__(self, module: nn.Module, marked: MarkedStep) -> None:
        self.module = module
        self.marked = marked
        self.joint = marked.joint
        self.values = marked.values
        self.position: dict[str, int] = {}  # of operators, by name
        self.owners: dict[fx.Node, frozenset[int]] = {}
        self.sums: set[fx.Node] = set()
        # Pairs of operators that one stage must have.
        self.pairs: list[tuple[int, int]] = []

    def read(self) -> MicrobatchStep:
        forward, backward = [], []
        for node in self.joint.graph.nodes:
            if node.op != "call_function":
                continue
            if self.joint.phase(node) == "backward":
                backward.append(node)
                continue
            if operator_of(node) is not None:  # others copy outputs
                forward.append(node)
        # In the order of their last nodes: a view that is taken again is among the nodes of its reader.
        names = [*dict.fromkeys(str(operator_of(node)) for node in reversed(forward))][::-1]
        self.position = position = {name: place for place, name in enumerate(names)}
        for node in forward:
            self.owners[node] = frozenset((position[str(operator_of(node))],))
        backward = [node for node in backward if not self._is_erased(node)]
        self._find_derivatives(backward)
        self._pair_readers(forward, backward)
        changing = self._pair_changes()
        nodes: list[list[fx.Node]] = [[] for _ in names]
        derivatives: list[list[fx.Node]] = [[] for _ in names]
        for node in forward:
            nodes[self._owner(node)].append(node)
        for node in backward:
            for place in self.owners.get(node, ()):
                derivatives[place].append(node)
        groups = self._groups(len(names), forward)
        operators = tuple(
            ForwardOperator(name, tuple(nodes[place]), tuple(derivatives[place])) for place, name in enumerate(names)
        )
        return MicrobatchStep(
            module=self.module,
            marked=self.marked,
            operators=operators,
            owners=self.owners,
            sums=frozenset(self.sums),
            together=tuple(tuple(names[place] for place in group) for group in groups),
            changing=frozenset(names[place] for place in changing),
            forward_fingerprint="",
            contributions={
                mark: tuple((leaf, self._contributor(leaf, mark)) for leaf in self._leaves(mark))
                for mark in self.joint.graph.find_nodes(op="call_function", target=GRADIENT_OF)
            },
        )

    def _is_erased(self, node: fx.Node) -> bool:
        """Erase the mark of a value that no operator makes: where it is read, a view is taken again."""
        if node.target is not GRADIENT_OF or value_number(node) in self.values or self._maker(node):
            return False
        node.replace_all_uses_with(node.all_input_nodes[0])
        self.joint.graph.erase_node(node)
        return True

    def _owner(self, node: fx.Node) -> int:
        (place,) = self.owners[node]
        return place

    def contribution_owners(self, leaf: fx.Node) -> frozenset[int]:
        """Return the operators through which a node goes into the gradient of a value."""
        # Behind a mark, it is the derivative of the operator that made the value: the identity.
        return self._maker(leaf) if leaf.target is GRADIENT_OF else self.owners.get(leaf, frozenset())

    def _leaves(self, mark: fx.Node) -> Iterator[fx.Node]:
        """Yield what is added up in the gradient of a value, in the order of the additions."""
        waiting = [*mark.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in self.sums:
                waiting += reversed(addends(node))
            else:
                yield node

    def _contributor(self, leaf: fx.Node, mark: fx.Node) -> int | None:
        if leaf.op == "placeholder":
            return None  # the gradient of an output
        return min(self.contribution_owners(leaf) or self._readers_of(leaf, mark))

    def _maker(self, mark: fx.Node) -> frozenset[int]:
        """Return the operator that made the value of a mark; none for parameters."""
        name = self.marked.makers[value_number(mark)]
        return frozenset((self.position[name],)) if name in self.position else frozenset()

    def _find_derivatives(self, backward: list[fx.Node]) -> None:
        """Find the owners of the nodes of the backward half."""
        tangents = {item.node for item in self.joint.inputs if item.kind == "tangent"}
        for node in backward:
            if node.target is GRADIENT_OF:
                continue
            found = [
                self.contribution_owners(operand)
                for operand in node.all_input_nodes
                if operand.op == "call_function" and self.joint.phase(operand) == "backward"
            ]
            owners = frozenset[int]().union(*found)
            of_several = len(set(filter(None, found))) > 1 or not (tangents | self.sums).isdisjoint(
                node.all_input_nodes
            )
            if _is_addition(node) and of_several:
                self.sums.add(node)
            elif len(owners) > 1:
                self._pair_all(owners)
            if owners:
                self.owners[node] = owners
        for node in backward:
            # A sum that something else than a gradient reads is no sum of gradients.
            if node in self.sums and any(
                user.target is not GRADIENT_OF and user not in self.sums for user in node.users
            ):
                self.sums.remove(node)
                self._pair_all(self.owners[node])
        # What depends on no gradient, such as a mask or zeros, belongs to what reads it.
        for node in reversed(backward):
            if node.target is not GRADIENT_OF and node not in self.owners:
                self.owners[node] = frozenset[int]().union(*(self._readers_of(node, user) for user in node.users))
        for node in self.sums:
            del self.owners[node]

    def _readers_of(self, node: fx.Node, user: fx.Node) -> frozenset[int]:
        if user.target is not GRADIENT_OF:
            return self.owners.get(user, frozenset())
        made = self._maker(user)
        value = self.values.get(value_number(user))
        if made or value is None:
            return made
        return next((self.owners[reader] for reader in value.users if reader in self.owners), frozenset())

    def _pair_all(self, owners: Iterable[int]) -> None:
        first, *others = sorted(owners)
        self.pairs += [(first, other) for other in others]

    def _pair_readers(self, forward: list[fx.Node], backward: list[fx.Node]) -> None:
        """Pair operators whose derivatives a stage could not compute from what it has."""
        reads: dict[int, set[fx.Node]] = {}
        for node in forward:
            reads.setdefault(self._owner(node), set()).update(node.all_input_nodes)
            for source in node.all_input_nodes:
                # A result that is no tensor can't be sent.
                if source in self.owners and not isinstance(source.meta.get("val"), torch.Tensor):
                    self._pair_all({self._owner(source), self._owner(node)})
        for node in backward:
            if node.target is GRADIENT_OF:
                self._pair_unseen(node, reads)
                continue
            for place in self.owners.get(node, ()):
                # A value that is made behind the operator.
                later = {self._owner(source) for source in node.all_input_nodes if self._is_forward(source)}
                self.pairs += [(place, other) for other in later if other > place]

    def _is_forward(self, node: fx.Node) -> bool:
        return node in self.owners and self.joint.phase(node) == "forward"

    def _pair_unseen(self, mark: fx.Node, reads: Mapping[int, set[fx.Node]]) -> None:
        """Pair the maker of a value and operators that give it a gradient though they read something else.

        So it is with views: where their memory is changed in place, readers take them again.
        """
        value, made = self.values.get(value_number(mark)), self._maker(mark)
        for leaf in self._leaves(mark):
            unseen = {place for place in self.contribution_owners(leaf) if value not in reads.get(place, ())}
            if made and unseen - made:
                self._pair_all(unseen | made)

    def _pair_changes(self) -> set[int]:
        """Pair the operators that read or change an input that the step changes, and return all of them."""
        changed: set[int] = set()
        sources = {item.name: item.node for item in self.joint.inputs if item.kind != "tangent"}
        for output in self.joint.outputs:
            if output.kind == "mutation" and output.node is not None:
                value = value_of(output.node)
                touching = frozenset[int]().union(
                    self.owners.get(value, frozenset()),
                    *(self.owners.get(user, ()) for user in sources[output.name].users),
                )
                if touching:
                    self._pair_all(touching)
                    changed |= touching
        return changed

    def _groups(self, count: int, forward: list[fx.Node]) -> Iterator[list[int]]:
        """Yield the operators that must run on one stage, in order."""
        edges = [
            (self._owner(source), self._owner(node))
            for node in forward
            for source in node.all_input_nodes
            if source in self.owners
        ]
        both = [*self.pairs, *((later, earlier) for earlier, later in self.pairs)]
        members: dict[int, list[int]] = {}
        for place, number in enumerate(strongly_connected_components(count, [*edges, *both])):
            members.setdefault(number, []).append(place)
        return (group for group in members.values() if len(group) > 1)


def addends(node: fx.Node) -> list[fx.Node]:
    """Return the two operands of an addition, which may be one node."""
    return [operand for operand in node.args if isinstance(operand, fx.Node)]


def _is_addition(node: fx.Node) -> bool:
    return node.target is aten.add.Tensor and not node.kwargs and all(isinstance(each, fx.Node) for each in node.args)
