"""The forward graph of a module, with one placeholder per tensor and a flat tuple of outputs.

`torch.export` makes the graph, under watches for everything that it would lose or get wrong.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import fx, nn

from autoshard.capture._torch import (
    FakeTensor,
    GuardOnDataDependentSymNode,
    InputKind,
    TensorArgument,
    attribute_patch,
    pytree,
)
from autoshard.capture.bound_call import BoundCall
from autoshard.capture.call_layout import (
    CallLayout,
    ResultLayout,
    call_layout,
    find_output_views,
    result_names,
)
from autoshard.capture.capture_errors import (
    OBJECT_ADVICE,
    OBJECT_FAULT,
    ModelError,
    Regions,
    capture_error,
    is_raised_by_user,
    node_line,
    node_place,
    running_line,
)
from autoshard.capture.dynamic import Dynamic, export_dynamic
from autoshard.capture.lazy_conjugates import write_out_conjugates
from autoshard.capture.nodes import closure, graphs_of, is_random
from autoshard.capture.padded_encoder import capturable_encoder
from autoshard.capture.python.called_code import PythonCalls, module_tensors, replace_python_calls
from autoshard.capture.python.data_reads import DataReads, RuntimeCheck
from autoshard.capture.python.fake_module import fake_like
from autoshard.capture.python.gradient_code import GradientCode
from autoshard.capture.python.host_random import HostRandom
from autoshard.capture.python.returned_objects import Argument, Constant, OpaqueOutputs, find_objects
from autoshard.capture.python.state import AssignedTensors, PythonState, SetBuffer, StateWatch
from autoshard.capture.replacements import current_replacements
from autoshard.errors import CaptureError

aten = torch.ops.aten

ExportedKind = Literal["parameter", "buffer", "constant", "input"]

# The kinds of inputs that a graph can hold; others, such as generators and effect tokens, are refused.
_KINDS: dict[InputKind, ExportedKind] = {
    InputKind.PARAMETER: "parameter",
    InputKind.BUFFER: "buffer",
    InputKind.CONSTANT_TENSOR: "constant",
    InputKind.USER_INPUT: "input",
}


@dataclass(frozen=True, slots=True)
class ExportedInput:
    """A placeholder of the exported graph; `value` is the tensor of a constant."""

    kind: ExportedKind
    name: str
    fake: torch.Tensor
    value: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Exported:
    """A module's forward graph: from tensors to tensors, with in-place changes of buffers.

    Attributes:
        aliases: all names of a parameter or buffer, by its first name.
        dynamic: for inputs by name, the names of dynamic dims.
        assigned: the buffers, by first name, that `forward` assigns another value. The value is copied at the end into
            the old buffer, which the graph reads.
        state: the Python state that `forward` reads and sets.
        twice_in_pieces: the operations, by dtype, that its losses repeat if computed in pieces (`loss_in_pieces`);
            empty without large logits.
        unread: names of the outputs that training does not read, and that the graph omits; None if it omits none
            because it has no loss, or was not asked to.
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
    twice_in_pieces: Mapping[torch.dtype, float] = field(default_factory=dict)
    unread: tuple[str, ...] | None = None

    @property
    def graph(self) -> fx.Graph:
        """The `fx.Graph` of `graph_module`."""
        return self.graph_module.graph

    @property
    def placeholders(self) -> dict[fx.Node, ExportedInput]:
        """The placeholders of the graph, in order, with their descriptions."""
        return dict(zip(self.graph.find_nodes(op="placeholder"), self.inputs, strict=True))


@dataclass(slots=True)
class NamedTensors:
    """Parameters and buffers by first name, the first name of every name, and all names by the first name."""

    fakes: dict[str, torch.Tensor] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)


def export_forward(
    state: StateWatch,
    call: BoundCall,
    dynamic: Dynamic | None,
    examples: Mapping[str, torch.Tensor],
) -> Exported:
    """Export the fake twin of a module, called with fake inputs.

    Args:
        state: holds the twin, and records its reads and changes of Python state.
        call: the call of the twin.
        dynamic: dims of inputs whose sizes may differ between calls.
        examples: those inputs, by name, that have numbers.

    Raises:
        CaptureError: a graph cannot represent `forward`.
    """
    module = state.twin
    state.mutations.note_state()
    watch = _ForwardWatch(state, examples)
    with watch.watching():
        if dynamic:
            program, sizes = export_dynamic(call, dynamic)
        else:
            program, sizes = torch.export.export(module, call.args, dict(call.kwargs), strict=False), {}
    watch.opaque.warn(type(module).__name__)
    watch.regions.check(program.graph)
    python_state = state.state()
    for graph in graphs_of(program.graph_module):
        replace_python_calls(graph, watch.calls)
        write_out_conjugates(graph)
        for replace_nodes in current_replacements().in_graphs:
            replace_nodes(graph)
    names = named_tensors(module)
    structure = program.call_spec.in_spec
    assert structure is not None
    # torch.export may order keyword arguments like `forward`, not like the caller.
    keywords = structure.unflatten(range(structure.num_leaves))[1]
    leaves = call.leaves
    if list(keywords) != list(call.kwargs):
        leaves = pytree.tree_leaves((call.args, {key: call.kwargs[key] for key in keywords}))
    layout = call_layout(module, structure, leaves)
    graph_module = program.graph_module
    inputs = _take_inputs(program, names, zip(layout.leaves, leaves, strict=True), bool(sizes), state)
    placeholders = dict(zip(graph_module.graph.find_nodes(op="placeholder"), inputs, strict=True))
    constants = {node: item.value for node, item in placeholders.items() if item.value is not None}
    for replace_by_constants in current_replacements().with_constants:
        replace_by_constants(graph_module.graph, constants)
    checks = tuple(check for _, check in watch.reads.assumptions)
    outputs, set_buffers, result = _take_outputs(program, watch, checks)
    kinds = {node: item.kind for node, item in placeholders.items()}
    buffers = tuple(_take_buffers(zip(watch.assigned.buffers, set_buffers, strict=True), names, kinds))
    sources = [(item.kind, item.name, node) for node, item in placeholders.items()]
    views = dict(find_output_views(dict(zip(result.names, outputs, strict=False)), sources))
    result = replace(result, views=views)
    python_state = replace(python_state, conditions=watch.reads.program.conditions())
    return Exported(graph_module, inputs, outputs, layout, result, names.aliases, sizes, buffers, python_state)


class _ForwardWatch:
    """All watches while the `forward` of a twin is exported.

    Args:
        state: holds the twin, and records its reads and changes of Python state.
        examples: those inputs, by name, that have numbers.

    Attributes:
        opaque: objects that a graph cannot return.
        reads: reads of numbers in tensors.
        assigned: tensors that the call assigns to Python objects.
        calls: Python code that acts on gradients.
        regions: branches and loops.
    """

    def __init__(self, state: StateWatch, examples: Mapping[str, torch.Tensor]) -> None:
        self._state = state
        self.opaque = OpaqueOutputs()
        self.reads = DataReads(examples, state.mutations.note_number)
        self.assigned = AssignedTensors(
            state.twin, state.mutations, lambda: [flag for flag, _ in self.reads.assumptions], state.end_hooks
        )
        self.calls = PythonCalls(state.twin, state.mutations)
        self.regions = Regions()
        self._gradients = GradientCode(self.calls)
        self._random = HostRandom(state.mutations)
        state.hooks.pause_watches = self._pause_watches

    @contextlib.contextmanager
    def _pause_watches(self) -> Iterator[None]:
        """Context for code within `forward` that is not watched."""
        watches = (self._state, self._gradients, self._random, self.reads)
        for watch in watches:
            watch.running = False
        try:
            yield
        finally:
            for watch in watches:
                watch.running = True

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Context for the export."""
        # Modes entered later see torch calls earlier: reads of numbers are seen before operators are replaced.
        with (
            capturable_encoder(),  # first, for a module that is an encoder itself
            attribute_patch(self._state.twin, "forward", self._watched_forward()),
            self.assigned.watching(),
            self._gradients.watching(),
            current_replacements().running_forward(),
            self.regions.watching(),
            self._random.watching(),
            self.reads,
            _unconverted_modules(),
            self._state.traced_parameters,
            self._state.watching(),  # last, so that only code of `forward` is watched
        ):
            yield

    def _watched_forward(self) -> Callable[..., Any]:
        forward = self._state.twin.forward

        @functools.wraps(forward)
        def run_watched(*args: Any, **kwargs: Any) -> Any:
            return self._run(forward, args, kwargs)

        return run_watched

    def _run(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run one call, and return its output with the tensors that it assigns."""
        # torch.export may call `forward` several times: every watch restarts, and the last call is the traced one.
        state, model = self._state, type(self._state.twin).__name__
        self.assigned.begin()
        self._gradients.begin()
        self._random.begin()
        call = BoundCall.of(state.twin, args, kwargs, torch.is_grad_enabled())
        self.reads.begin(call.tensors, state.held_tensors())
        passed = find_objects(args, kwargs)
        state.begin()
        try:
            output = forward(*args, **kwargs)
            state.end()  # before code of this library reads attributes of the module
            output = self.assigned.end(self.opaque.replace(output, passed))
            self._gradients.end(output)
            self._random.end(model)
        except GuardOnDataDependentSymNode as error:
            state.hooks.check()
            # Raised here, before torch puts the whole graph into a message.
            raise capture_error(model, error) from error
        except Exception as error:
            state.hooks.check()  # a trial run may have left the state that the error is about
            # After a branch that depends on numbers in inputs, an error is the model's own reaction to these numbers.
            if self.reads.program.has_read() and is_raised_by_user(error):
                raise ModelError(error) from error
            raise
        finally:
            # torch's code after `forward`, or after an error, is not watched.
            state.running = state.hooks.running = self._gradients.running = self._random.running = (
                self.reads.running
            ) = False
        return output


@contextlib.contextmanager
def _unconverted_modules() -> Iterator[None]:
    """Context in which `module.to(...)` and the like raise an error, unless there is nothing to convert."""

    # torch would replace every fake parameter by another object, unknown to the graph.
    def apply(module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for name, tensor in (*module.named_parameters(recurse=recurse), *module.named_buffers(recurse=recurse)):
            with torch.no_grad():
                converted = convert(tensor)
            if converted is not tensor:
                raise CaptureError(
                    f"{running_line()} converts {type(module).__name__}.{name} from {tensor.dtype} on {tensor.device} "
                    f"to {converted.dtype} on {converted.device}: a parallelised module keeps its parameters and "
                    "buffers. Convert the module before autoshard.parallelize, or what is computed with them in "
                    "forward."
                )
        return module

    with attribute_patch(nn.Module, "_apply", apply):
        yield


def named_tensors(module: nn.Module) -> NamedTensors:
    """Return the parameters and buffers of a module."""
    names = NamedTensors()
    # By identity, because tensors compare elementwise.
    by_identity: dict[int, str] = {}
    for name, tensor in module_tensors(module):
        first = by_identity.setdefault(id(tensor), name)
        names.fakes.setdefault(first, tensor)
        names.first[name] = first
        names.aliases[first] = (*names.aliases.get(first, ()), name)
    return names


def _take_inputs(
    program: torch.export.ExportedProgram,
    names: NamedTensors,
    passed: Iterator[tuple[str | Constant, Any]],
    dynamic: bool,
    state: StateWatch,
) -> tuple[ExportedInput, ...]:
    """Merge and describe placeholders, one per tensor: tied names share one, and plain values have none."""
    graph = program.graph_module.graph
    # Tensors in attributes; an export names them by their paths.
    attributes = {
        f"{path}.{name}" if path else name
        for path, part in state.twin.named_modules()
        for name, tensor in vars(part).items()
        if isinstance(tensor, torch.Tensor)
    }
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    first: dict[tuple[str, str], fx.Node] = {}
    inputs = []
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        kind = _KINDS.get(spec.kind)
        if kind is None:
            raise CaptureError(f"{node_place(next(iter(node.users), node), OBJECT_FAULT)}. {OBJECT_ADVICE}")
        value = None
        if kind == "input":
            name, fake = next(passed)
            if isinstance(name, Constant):
                graph.erase_node(node)
                continue
        elif kind == "constant":
            name = str(spec.target)
            constant = program.constants[name]
            reader = next(iter(node.users), node)
            if not has_storage(constant):
                raise _lost_error(reader)
            # Another call would not find it.
            state.mutations.check_constant(constant, node_line(reader))
            state.traced_parameters.check_constant(constant, node_line(reader))
            # A fake constant that is no attribute was made by code that the export did not trace.
            if isinstance(constant, FakeTensor) and name not in attributes:
                raise _lost_error(reader)
            fake = fake_like(constant, state.mode)
            value = None if isinstance(constant, FakeTensor) else constant
        else:
            name = names.first[str(spec.target)]
            fake = names.fakes[name]
        if (kind, name) in first:
            node.replace_all_uses_with(first[kind, name])
            graph.erase_node(node)
            continue
        # With dynamic sizes, torch.export made new fake tensors with symbolic sizes.
        if dynamic:
            fake = node.meta["val"].requires_grad_(fake.requires_grad)
        first[kind, name] = node
        inputs.append(ExportedInput(kind, name, fake, value))
    return tuple(inputs)


def has_storage(tensor: torch.Tensor) -> bool:
    """Return False for a tensor of a transform such as vmap."""
    try:
        tensor.untyped_storage()
    except NotImplementedError:
        return False
    return True


def _lost_error(reader: fx.Node) -> CaptureError:
    """Return the error for a tensor that was made during the export of `forward`, but not in the graph."""
    place = node_place(reader, "reads a tensor that torch.export did not see being made")
    return CaptureError(
        f"{place}. torch.vmap leaves one behind where its out_dims are not 0: leave out_dims out, and move the dim of "
        "the result, as in torch.vmap(f)(x).movedim(0, 2). Inside of transforms of torch.func, parameters are such: "
        "write the operation for a whole batch. A tensor that an earlier call left in a list or an object is, too: "
        "keep it in an attribute of the module."
    )


def _take_outputs(
    program: torch.export.ExportedProgram, watch: _ForwardWatch, checks: tuple[RuntimeCheck, ...]
) -> tuple[tuple[fx.Node, ...], tuple[fx.Node, ...], ResultLayout]:
    """Return the nodes of outputs and flags, those of assigned buffers, and the layout of the result of `forward`."""
    output = program.graph_module.graph.output_node()
    structure = program.call_spec.out_spec
    assert structure is not None
    specs = program.graph_signature.output_specs
    assert len(specs) == structure.num_leaves == len(output.args[0])
    # A hook packed the result of `forward` into a tuple with further tensors; its structure is the first element.
    assigned = watch.assigned
    attributes = assigned.attributes
    if attributes or assigned.buffers or checks:
        structure = pytree.tree_flatten(structure.unflatten(range(structure.num_leaves))[0])[1]
    leaves: list[str | Constant | Argument] = []
    nodes = []
    for name, spec, node in zip(result_names(structure), specs, output.args[0], strict=False):
        if isinstance(spec.arg, TensorArgument):
            leaves.append(name)
            nodes.append(node)
        else:
            if isinstance(node, fx.Node):
                raise _number_error(node, name)
            leaves.append(watch.opaque.restored.get(name, Constant(spec.arg.value)))
    result = ResultLayout(structure, tuple(leaves), attributes, checks)
    # After the leaves of the result: attributes, then buffers, then flags of checks.
    further = output.args[0][len(leaves) :]
    first, end = len(attributes), len(attributes) + len(assigned.buffers)
    return (*nodes, *further[:first], *further[end:]), tuple(further[first:end]), result


def _number_error(node: fx.Node, name: str) -> CaptureError:
    """Return the error for a number in the result of `forward` that differs between calls."""
    # Numbers read from a tensor, such as by `tolist`, come from views of it, which have the model's lines.
    line = node_line(node) or next(filter(None, map(node_line, node.all_input_nodes)), "")
    return CaptureError(
        f"forward returns a number, {name}, that depends on the call" + (f" ({line})" if line else "") + ": it is read "
        "from a tensor, as by item() or tolist(), or computed from a dynamic size, and a program returns tensors. "
        "Return the tensor, such as loss.detach(), and read the number outside of forward; take a size from a tensor's "
        "shape."
    )


def _take_buffers(
    assigned: Iterable[tuple[SetBuffer, fx.Node]], names: NamedTensors, kinds: Mapping[fx.Node, ExportedKind]
) -> Iterator[tuple[str, fx.Node]]:
    """Yield the buffers whose new values are kept, by first name, with the nodes of the values.

    Raises:
        CaptureError: the module cannot hold a new value.
    """
    for buffer, node in assigned:
        if buffer.fault is None:
            yield names.first[buffer.name], node
            continue
        # A cache of constants only, such as a table of positions, is not kept: every call makes it.
        sources = closure([node], lambda source: source.all_input_nodes)
        if any(kinds.get(source, "constant") != "constant" or is_random(source) for source in sources):
            raise CaptureError(buffer.fault)
