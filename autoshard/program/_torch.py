"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

# Gives precedence to kernels that support symbolic sizes.
from torch._dispatch.python import enable_python_dispatcher

# Lets compiled code free each tensor of a list argument after its last use.
from torch._dynamo.utils import set_locals_to_steal

# Splits a joint graph into halves.
from torch._functorch.partitioners import default_partition

# The strides of results of elementwise kernels.
from torch._prims_common import compute_elementwise_output_strides as compute_elementwise_output_strides

# Tensors of a program before it runs, with shapes but no data, and their mode.
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode

# Modules that generate the code of a graph at its first run; the graphs between a step and its halves never run.
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Generates code that takes arguments as a list and frees each after its last use.
from torch.fx.graph import _BoxedCodeGen

# Intercepts every operator call while it is active.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from autoshard.capture._torch import lazy_graph_module as lazy_graph_module
from autoshard.capture._torch import symbolic_integer
from autoshard.reshard.reductions import is_border


class SymbolicNumbers:
    """Torch's symbolic integers, and the fake mode of tensors with such sizes."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        # A new entry of torch's cache costs as much as the operator, and callers run equal calls once.
        self.mode.cache_enabled = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which operators run on tensors of symbolic sizes."""
        with self.mode, enable_python_dispatcher(), torch.no_grad():
            yield

    def new(self, value: int, number: int) -> tuple[int | torch.SymInt, sympy.Symbol]:
        """Return the `number`-th symbolic integer and its symbol; its hint is `value`."""
        return symbolic_integer(self.env, value, number, small=True)


def run_meta_kernel(mode: FakeTensorMode, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FakeTensor | None:
    """Return the fake result of an operator on fake tensors of plain sizes; None if they are on several devices.

    Torch's meta kernels take a tenth of the time of `mode` for the same result: the mode handles symbolic sizes, and
    maintains a cache.
    """
    devices: set[torch.device] = set()

    def without_numbers(argument: Any) -> Any:
        if not isinstance(argument, FakeTensor):
            return argument
        devices.add(argument.device)
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device="meta")

    # Hidden from modes of the caller.
    with torch._C._DisableTorchDispatch():
        operands: Any = fx.node.map_aggregate((args, kwargs), without_numbers)
        if len(devices) > 1:
            return None
        return FakeTensor(mode, op(*operands[0], **operands[1]), devices.pop())


def append_node(
    graph: fx.Graph, op: str, name: str, target: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> fx.Node:
    """Append a node with a unique name to a graph that never becomes code.

    `Graph.create_node` takes three times as long: it searches arguments for symbols, and a free name.
    """
    node = fx.Node(graph, name, op, target, args, kwargs or {})
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def split_joint(joint: fx.GraphModule, forward_outputs: int) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph whose tangents are placeholders called `tangents_*` into forward and backward.

    The forward graph returns its outputs and then the saved tensors, which the backward graph takes before the
    tangents. Neither has code yet.
    """
    output: Any = joint.graph.output_node()
    # The partitioner reads a description of every output, which `aot_autograd` writes.
    output.meta.setdefault("desc", [None] * len(output.args[0]))
    with _use_lazy_graph_module(True):
        forward, backward = default_partition(joint, None, num_fwd_outputs=forward_outputs)
    _drop_unread_saves(forward, backward, forward_outputs)
    return forward, backward


def _drop_unread_saves(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Drop saved tensors that the backward graph does not read."""
    # Torch's partitioner saves the operands of dead copies of calls.
    backward.graph.eliminate_dead_code(is_impure_node=is_border)
    output: Any = forward.graph.output_node()
    results = tuple(output.args[0])
    kept = []
    for placeholder, result in zip(
        list(backward.graph.find_nodes(op="placeholder")), results[forward_outputs:], strict=False
    ):
        if placeholder.users:
            kept.append(result)
        else:
            backward.graph.erase_node(placeholder)
    output.args = ((*results[:forward_outputs], *kept),)


def write_code(graph: fx.GraphModule, take_list: bool = False) -> None:
    """Generate the code of a finished graph.

    With `take_list` it takes its arguments as one list, which it empties: each is freed after its last use. Compiled
    code with number arguments frees all at its end.
    """
    if take_list:
        graph.graph.set_codegen(_BoxedCodeGen())
        arguments = graph.graph.find_nodes(op="placeholder")
        if all(isinstance(node.meta["val"], torch.Tensor) for node in arguments):
            set_locals_to_steal(graph, ["args_list"])
    graph.recompile()
    _LazyGraphModule.force_recompile(graph)


def compile_graph(graph: fx.GraphModule, dynamic: bool) -> Any:
    """Return the graph compiled by inductor at its first call; its shapes are fixed unless sizes are dynamic."""
    # Inductor's reorderings for memory and locality would start all gathers of parameters first and await each at once.
    options: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    return torch.compile(graph, backend="inductor", dynamic=dynamic, fullgraph=True, options=options)


def memory_of(tensor: torch.Tensor) -> int:
    """Return an id of the storage of a tensor, real or fake."""
    return int(tensor.untyped_storage()._cdata)
