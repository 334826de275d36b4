"""The private torch names that this room uses, in one place."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import sympy
import torch
from torch import fx

# Puts kernels that know symbolic sizes first.
from torch._dispatch.python import enable_python_dispatcher

# Split a joint graph in halves; `min_cut` recomputes cheap operators, which pays where the halves are compiled.
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition

# The tensors of a program before it runs, which have shapes and no numbers, and the mode in which they are made.
from torch._subclasses import FakeTensor as FakeTensor
from torch._subclasses import FakeTensorMode as FakeTensorMode

# Modules that write the code of a graph when it first runs: none of the graphs between a step and its halves does.
from torch.fx._lazy_graph_module import _LazyGraphModule, _use_lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# Makes a graph that takes its arguments as a list and lets go of each after its last use.
from torch.fx.graph import _BoxedCodeGen

# Sees every operator that is called while it is active.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

from autoshard.capture._torch import symbolic_integer
from autoshard.reshard.reductions import is_border


class SymbolicNumbers:
    """Torch's symbolic integers, and the fake mode of tensors with such sizes."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        # Making an entry of torch's cache costs as much as the operator, and callers run equal calls once.
        self.mode.cache_enabled = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Return a context in which operators run on tensors of symbolic sizes."""
        with self.mode, enable_python_dispatcher(), torch.no_grad():
            yield

    def new(self, value: int, number: int) -> tuple[int | torch.SymInt, sympy.Symbol]:
        """Return the `number`-th symbolic integer and its symbol; it is `value` where torch needs a number."""
        return symbolic_integer(self.env, value, number, small=True)


def lazy_graph_module(graph: fx.Graph) -> fx.GraphModule:
    """Return a module of a graph, without code until it runs."""
    return _LazyGraphModule(torch.nn.Module(), graph)


def split_joint(joint: fx.GraphModule, forward_outputs: int, recompute: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph whose tangents are placeholders called `tangents_*` into forward and backward.

    The forward graph returns its outputs and then the saved tensors, which the backward graph takes first, before the
    tangents. Neither has code yet.
    """
    output: Any = joint.graph.output_node()
    # The partitioner reads a description of every output, which `aot_autograd` writes.
    output.meta.setdefault("desc", [None] * len(output.args[0]))
    partition = min_cut_rematerialization_partition if recompute else default_partition
    with _use_lazy_graph_module(True):
        forward, backward = partition(joint, None, num_fwd_outputs=forward_outputs)
    if not recompute:
        _drop_unread_saves(forward, backward, forward_outputs)
    return forward, backward


def _drop_unread_saves(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Save no tensor that the backward graph does not read."""
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
    """Write the code of a finished graph.

    With `take_list` it takes its arguments as one list, which it empties: each is freed after its last use.
    """
    if take_list:
        graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    _LazyGraphModule.force_recompile(graph)


def compile_graph(graph: fx.GraphModule, dynamic: bool) -> Any:
    """Return the graph compiled by inductor at its first call; its shapes are fixed unless sizes are dynamic."""
    # Inductor's own orders, made for memory and locality, start all gathers of parameters first and await each at once.
    options: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    return torch.compile(graph, backend="inductor", dynamic=dynamic, fullgraph=True, options=options)


_OVERLAP_OPTIONS: dict[str, Any] = {
    # The prices of our hook, which are cached on no disk.
    "compute_estimator": "analytical",
    # It would size buckets by links that it takes for NCCL's.
    "pre_bucketing_fsdp_collectives": False,
}


@functools.cache
def _overlap_scheduling() -> Any:
    """Return torch's module that orders and joins collectives; None where a release lacks a name that is used."""
    try:
        # Orders and joins the collectives of a graph, for the compiler; takes prices by a hook.
        from torch._inductor.fx_passes import overlap_scheduling
    except ImportError:
        return None
    names = ("schedule_overlap_bucketing", "estimate_roofline_runtime_ms")
    if not all(hasattr(overlap_scheduling, name) for name in names):
        return None
    known = inspect.signature(overlap_scheduling.schedule_overlap_bucketing).parameters
    hooks = {"collective_bucketing", "custom_runtime_estimation", "compute_estimator"}
    return overlap_scheduling if known.keys() >= hooks else None


def has_overlap_pass() -> bool:
    """Return True if this release of torch orders collectives by prices that it is given."""
    return _overlap_scheduling() is not None


def schedule_overlap(
    graph: fx.GraphModule, seconds: Callable[[fx.Node, int | None], float | None], join: bool, bytes_more: int
) -> None:
    """Order the collectives of a graph in place by torch's pass.

    Args:
        graph: half a program.
        seconds: of a call; of a collective, for the given number of bytes, if any.
        join: True to join collectives, too.
        bytes_more: the bytes by which the peak of memory may grow.
    """

    def milliseconds(node: fx.Node, size: int | None) -> float | None:
        price = seconds(node, size)
        return None if price is None else 1e3 * price

    passes = _overlap_scheduling()
    pass_of_torch = passes.schedule_overlap_bucketing
    options = {
        **_OVERLAP_OPTIONS,
        "collective_bucketing": join,
        "custom_runtime_estimation": milliseconds,
        "max_memory_increase_gb": bytes_more / 2**30,
        "max_memory_increase_ratio": None,
    }
    known = inspect.signature(pass_of_torch).parameters
    # The pass asks a GPU for its rates, and then takes our prices.
    with mock.patch.object(passes, "estimate_roofline_runtime_ms", return_value=0.0):
        pass_of_torch(graph, **{name: value for name, value in options.items() if name in known})


def has_symmetric_memory(group: str) -> bool:
    """Return True if a process group has symmetric memory, and torch can fuse products with its collectives."""
    try:
        # Of a group by its name.
        from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group
    except ImportError:
        return False
    return _fuse_products() is not None and is_symm_mem_enabled_for_group(group)  # type: ignore[arg-type]


@functools.cache
def _fuse_products() -> Callable[[fx.Graph], None] | None:
    try:
        # Fuses products with the gathers before them and the reduce-scatters behind them, in symmetric memory.
        from torch._inductor.fx_passes.micro_pipeline_tp import micro_pipeline_tp_pass
    except ImportError:
        return None
    fusion_pass: Callable[[fx.Graph], None] = micro_pipeline_tp_pass
    return fusion_pass


def fuse_products(graph: fx.Graph) -> None:
    """Fuse products with collectives over groups that have symmetric memory, by torch's pass."""
    pass_of_torch = _fuse_products()
    assert pass_of_torch is not None, "no group has symmetric memory"
    pass_of_torch(graph)
    graph.eliminate_dead_code(is_impure_node=is_border)
    # The pass gives its calls no fake tensors, which later passes read.
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
            vals = (source.meta.get("val") for source in graph.nodes)
            mode = next(val.fake_mode for val in vals if isinstance(val, FakeTensor))
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors in the same memory; fake tensors have such numbers, too."""
    return int(tensor.untyped_storage()._cdata)
