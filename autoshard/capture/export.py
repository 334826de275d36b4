"""The forward graph of a module by `torch.export`, with one placeholder per tensor and a flat tuple of outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from autoshard.capture._torch import FakeTensor, FakeTensorMode, InputKind, TensorArgument, pytree
from autoshard.capture.assigned_tensors import AssignedTensors, SetBuffer
from autoshard.capture.call_layout import CallLayout, Constant, ResultLayout, RuntimeCheck, call_layout, result_names
from autoshard.capture.capture_errors import Regions, node_line, node_place, refusing_branches
from autoshard.capture.composites import Exportable, replace_composites
from autoshard.capture.conversions import unconverted_modules
from autoshard.capture.data_reads import DataReads
from autoshard.capture.dynamic import Dynamic, export_dynamic
from autoshard.capture.fake_module import fake_like
from autoshard.capture.flex_attention import capturable_flex_attention
from autoshard.capture.gradient_code import GradientCode
from autoshard.capture.host_random import HostRandom
from autoshard.capture.masks import replace_position_masks
from autoshard.capture.opaque_outputs import OpaqueOutputs
from autoshard.capture.output_views import find_output_views
from autoshard.capture.python_calls import PythonCalls, replace_python_calls
from autoshard.capture.python_state import PythonState, StateWatch
from autoshard.capture.routing_patterns import replace_routing
from autoshard.capture.simplify import is_random
from autoshard.errors import CaptureError

ExportedKind = Literal["parameter", "buffer", "constant", "input"]

aten = torch.ops.aten

ASSIGNS = "assigns"
"""In the meta of a copy into a buffer behind all that reads the buffer."""

_KINDS: dict[InputKind, ExportedKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True, slots=True)
class ExportedInput:
    """A placeholder of the exported graph; `value` holds the numbers of a constant."""

    kind: ExportedKind
    name: str
    fake: torch.Tensor
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Exported:
    """A module's forward graph: tensors in, tensors out, buffers still changed in place.

    `assigned` are the buffers, by first name, that have another value when all is done: it is written over the old one,
    which the graph reads until then. `state` is what else of the module was read and set.
    """

    graph_module: fx.GraphModule
    inputs: tuple[ExportedInput, ...]
    outputs: tuple[fx.Node, ...]
    call: CallLayout
    result: ResultLayout
    aliases: dict[str, tuple[str, ...]]
    dynamic: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    assigned: tuple[tuple[str, fx.Node], ...] = ()
    state: PythonState = field(default_factory=PythonState)


@dataclass(slots=True)
class NamedTensors:
    """Parameters and buffers by first name, the first name behind every name, and all names behind the first."""

    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)


def export_forward(
    twin: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    mode: FakeTensorMode,
    dynamic: Dynamic | None,
    state: StateWatch,
    examples: Mapping[str, torch.Tensor],
) -> Exported:
    """Export a fake twin called with fake inputs, of which some sizes may be dynamic.

    `examples` are the inputs by name, as far as they have numbers.
    """
    opaque = OpaqueOutputs()
    state.mutations.note_state()
    reads = DataReads(examples, state.mutations.note_number)
    assigned = AssignedTensors(twin, state.mutations, lambda: [one.flag for one in reads.assumptions])
    twin.register_forward_hook(opaque)
    calls, regions = PythonCalls(twin, state.mutations), Regions()
    with (
        refusing_branches(twin, reads.has_read),
        assigned.watching(),
        GradientCode(calls).watching(twin),
        capturable_flex_attention(),
        Exportable(),
        regions.watching(),
        HostRandom(state.mutations).watching(twin),
        reads.watching(twin),
        unconverted_modules(),
        state.traced_parameters,
        state.watching(),
    ):
        if dynamic:
            program, sizes = export_dynamic(twin, args, kwargs, dynamic)
        else:
            program, sizes = torch.export.export(twin, args, dict(kwargs), strict=False), {}
    opaque.warn(type(twin).__name__)
    regions.check(program.graph)
    seen = state.state()
    replace_python_calls(program.graph_module, calls)
    replace_composites(program.graph_module)
    replace_routing(program.graph_module)
    names = named_tensors(twin)
    structure = program.call_spec.in_spec
    assert structure is not None
    keywords = structure.unflatten(range(structure.num_leaves))[1]
    leaves = pytree.tree_leaves((args, {key: kwargs[key] for key in keywords}))
    call = call_layout(twin, structure, leaves)
    graph_module = program.graph_module
    inputs = _take_inputs(program, names, call, leaves, mode, bool(sizes), twin, state)
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    known = {node: item.value for node, item in zip(placeholders, inputs, strict=True) if item.value is not None}
    replace_position_masks(graph_module.graph, known)
    outputs, set_buffers, result = _take_outputs(program, assigned, tuple(one.check for one in reads.assumptions))
    kinds = dict(zip(placeholders, (item.kind for item in inputs), strict=True))
    buffers = tuple(_take_buffers(zip(assigned.buffers, set_buffers, strict=True), names, kinds))
    sources = [(item.kind, item.name, node) for item, node in zip(inputs, placeholders, strict=True)]
    views = dict(find_output_views(dict(zip(result.names, outputs, strict=False)), sources))
    result = replace(result, views=views)
    seen = replace(seen, conditions=reads.conditions())
    return Exported(graph_module, inputs, outputs, call, result, names.aliases, sizes, buffers, seen)


def named_tensors(module: nn.Module) -> NamedTensors:
    """The parameters and buffers of a module."""
    names = NamedTensors()
    by_identity: dict[int, str] = {}
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    for name, tensor in tensors:
        first = by_identity.setdefault(id(tensor), name)
        names.fakes.setdefault(first, tensor)
        names.first[name] = first
        names.aliases[first] = (*names.aliases.get(first, ()), name)
    return names


def _take_inputs(
    program: torch.export.ExportedProgram,
    names: NamedTensors,
    call: CallLayout,
    leaves: list[Any],
    mode: FakeTensorMode,
    dynamic: bool,
    twin: nn.Module,
    state: StateWatch,
) -> tuple[ExportedInput, ...]:
    """Leave one placeholder per tensor: tied names share one, plain values have none."""
    graph = program.graph_module.graph
    held = {
        f"{path}.{name}" if path else name
        for path, part in twin.named_modules()
        for name, tensor in vars(part).items()
        if isinstance(tensor, torch.Tensor)
    }
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    user = iter(zip(call.leaves, leaves, strict=True))
    seen: dict[tuple[str, str], fx.Node] = {}
    inputs = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = _KINDS.get(spec.kind)
        if kind is None:
            what = "takes an object such as a torch.Generator, which no graph can hold"
            raise CaptureError(
                f"{node_place(next(iter(node.users), node), what)}. Leave the generator out: numbers are drawn by the "
                "seed of the step, the same on every mesh of one shape; or draw them outside of forward."
            )
        value = None
        if kind == "input":
            name, fake = next(user)
            if isinstance(name, Constant):
                graph.erase_node(node)
                continue
        elif kind == "constant":
            name = str(spec.target)
            constant = program.constants[name]
            reader = next(iter(node.users), node)
            if not _has_storage(constant):
                raise _lost_error(reader)
            state.check_constant(constant, node_line(reader))
            if isinstance(constant, FakeTensor) and name not in held:
                raise _lost_error(reader)
            fake = fake_like(constant, mode)
            value = None if isinstance(constant, FakeTensor) else constant
        else:
            name = names.first[str(spec.target)]
            fake = names.fakes[name]
        if (kind, name) in seen:
            node.replace_all_uses_with(seen[kind, name])
            graph.erase_node(node)
            continue
        if dynamic:  # export made fakes of its own, with symbols for sizes
            fake = node.meta["val"].requires_grad_(fake.requires_grad)
        seen[kind, name] = node
        inputs.append(ExportedInput(kind, name, fake, value))
    return tuple(inputs)


def _has_storage(tensor: torch.Tensor) -> bool:
    """Return False for the tensor of a transform such as vmap."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _lost_error(reader: fx.Node) -> CaptureError:
    """Return the refusal of a tensor that was made while `forward` was exported, of which the graph knows nothing."""
    place = node_place(reader, "reads a tensor that torch.export did not see being made")
    return CaptureError(
        f"{place}. torch.vmap leaves one behind where its out_dims are not 0: leave out_dims out, and move the dim of "
        "the result, as in torch.vmap(f)(x).movedim(0, 2). Inside of transforms of torch.func, parameters are such: "
        "write the operation for a whole batch. A tensor that an earlier call left in a list or an object is, too: "
        "keep it in an attribute of the module."
    )


def _take_outputs(
    program: torch.export.ExportedProgram, assigned: AssignedTensors, checks: tuple[RuntimeCheck, ...]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...], ResultLayout]:
    """The nodes of outputs and flags, those of assigned buffers, and how the first become what `forward` returns."""
    output = next(reversed(program.graph_module.graph.nodes))
    structure = program.call_spec.out_spec
    assert structure is not None
    specs = program.graph_signature.output_specs
    assert len(specs) == structure.num_leaves == len(output.args[0])
    if assigned.found or assigned.buffers or checks:
        structure = pytree.tree_flatten(structure.unflatten(range(structure.num_leaves))[0])[1]
    leaves: list[str | Constant] = []
    nodes = []
    for name, spec, node in zip(result_names(structure), specs, output.args[0], strict=False):
        if isinstance(spec.arg, TensorArgument):
            leaves.append(name)
            nodes.append(node)
        else:
            leaves.append(Constant(spec.arg.value))
    result = ResultLayout(structure, tuple(leaves), assigned.found, checks)
    more = output.args[0][len(leaves) :]
    end = len(assigned.found), len(assigned.found) + len(assigned.buffers)
    return (*nodes, *more[: end[0]], *more[end[1] :]), tuple(more[end[0] : end[1]]), result


def _take_buffers(
    assigned: Iterable[tuple[SetBuffer, fx.Node]], names: NamedTensors, kinds: Mapping[fx.Node, ExportedKind]
) -> Iterator[tuple[str, fx.Node]]:
    """The buffers whose new values are to be kept, and these.

    A cache that is made of no input, parameter or buffer, such as a table of positions, may be made anew by every call.

    Args:
        assigned: what forward set, and the nodes of the new values.
        names: of the buffers that the module has.
        kinds: of the placeholders.

    Raises:
        CaptureError: the module can't hold a new value.
    """
    for buffer, node in assigned:
        if buffer.fault is None:
            yield names.first[buffer.name], node
        elif any(kinds.get(source, "constant") != "constant" or is_random(source) for source in _ancestors(node)):
            raise CaptureError(buffer.fault)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """A node and all that it is made of."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def with_copies(exported: Exported) -> Exported:
    """The graph with what is assigned to buffers as copies into them, the last operators, marked in their meta.

    What reads such a buffer reads a copy of its old value: autograd and views never meet the new one.
    """
    graph = exported.graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    held = {item.name: node for item, node in zip(exported.inputs, placeholders, strict=True) if item.kind == "buffer"}
    old: dict[fx.Node, fx.Node] = {}
    for buffer in (held[name] for name, _ in exported.assigned):
        if buffer.users:
            with graph.inserting_before(min(buffer.users)):
                copy = old[buffer] = graph.call_function(aten.clone.default, (buffer,))
            copy.meta = {**copy.next.meta, "val": buffer.meta["val"]}
            for user in [user for user in buffer.users if user is not copy]:
                user.replace_input_with(buffer, copy)
    with graph.inserting_before(graph.output_node()):
        for name, assigned in exported.assigned:
            value = old.get(assigned, assigned)
            copy = graph.call_function(aten.copy_.default, (held[name], value))
            copy.meta = {**value.meta, "val": held[name].meta["val"], ASSIGNS: True}
    return replace(exported, outputs=tuple(old.get(node, node) for node in exported.outputs), assigned=())
