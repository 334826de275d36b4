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

# Symbolic sizes of fake tensors.
from torch._dispatch.python import enable_python_dispatcher  # kernels that know symbolic sizes come first

# Torch's partitioners of a joint graph into forward and backward: the plain one keeps every operator in its half,
# the other recomputes cheap operators, which pays where the halves are compiled.
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


class SymbolicNumbers:
    """Symbolic integers of torch's."""

    def __init__(self) -> None:
        self.env = ShapeEnv(duck_shape=False)
        self.mode = FakeTensorMode(shape_env=self.env, allow_non_fake_inputs=True)
        # Making an entry costs as much as the operator, and whoever uses the mode runs equal calls once.
        self.mode.cache_enabled = False

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which operators run on tensors of symbolic sizes."""
        with self.mode, enable_python_dispatcher(), torch.no_grad():
            yield

    def new(self, value: int, number: int) -> tuple[int | torch.SymInt, sympy.Symbol]:
        """A symbolic integer that is `value` where it has to be a number, the `number`-th, and its symbol."""
        return symbolic_integer(self.env, value, number, small=True)


def lazy_graph_module(graph: fx.Graph) -> fx.GraphModule:
    """A module of a graph, without code until it runs."""
    return _LazyGraphModule(torch.nn.Module(), graph)


def split_joint(joint: fx.GraphModule, forward_outputs: int, recompute: bool) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph whose tangents are placeholders called `tangents_*` into forward and backward.

    The forward graph returns its outputs and then what it saves, which the backward graph takes before the tangents.
    Neither has code yet.
    """
    output: Any = next(iter(joint.graph.find_nodes(op="output")))
    output.meta.setdefault("desc", [None] * len(output.args[0]))
    partition = min_cut_rematerialization_partition if recompute else default_partition
    with _use_lazy_graph_module(True):
        forward, backward = partition(joint, None, num_fwd_outputs=forward_outputs)
    if not recompute:
        _drop_unread_saves(forward, backward, forward_outputs)
    return forward, backward


def _drop_unread_saves(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Save nothing that the backward graph does not read: torch keeps what dead copies of calls read."""
    backward.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    output: Any = next(iter(forward.graph.find_nodes(op="output")))
    results = tuple(output.args[0])
    taken = list(backward.graph.find_nodes(op="placeholder"))
    kept = []
    for placeholder, result in zip(taken, results[forward_outputs:], strict=False):
        if placeholder.users:
            kept.append(result)
        else:
            backward.graph.erase_node(placeholder)
    output.args = ((*results[:forward_outputs], *kept),)


def write_code(graph: fx.GraphModule, take_list: bool = False) -> None:
    """Write the code of a graph that is finished.

    Args:
        graph: becomes a module that can run.
        take_list: whether it takes its arguments as one list, which it empties; they are then freed after their last
            use.
    """
    if take_list:
        graph.graph.set_codegen(_BoxedCodeGen())
    graph.recompile()
    _LazyGraphModule.force_recompile(graph)


def compile_graph(graph: fx.GraphModule, dynamic: bool) -> Any:
    """The graph compiled by inductor at its first call; its shapes are fixed unless sizes are dynamic.

    Inductor keeps the graph's order: its own, made for memory and locality, starts all gathers of parameters first and
    awaits each at once.
    """
    options: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    return torch.compile(graph, backend="inductor", dynamic=dynamic, fullgraph=True, options=options)


_OVERLAP_OPTIONS: dict[str, Any] = {
    "compute_estimator": "analytical",  # the hook's prices, which are kept on no disk
    "pre_bucketing_fsdp_collectives": False,  # sizes buckets by links that it takes for NCCL's
}


@functools.cache
def _overlap_scheduling() -> Any:
    """The module of torch that orders and joins collectives; None where a release lacks what is used of it."""
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
    """Whether this release of torch orders collectives by prices that it is given."""
    return _overlap_scheduling() is not None


def schedule_overlap(
    graph: fx.GraphModule, seconds: Callable[[fx.Node, int | None], float | None], join: bool, bytes_more: int
) -> None:
    """Order the collectives of a graph by torch's pass.

    Args:
        graph: is changed.
        seconds: of a call; of a collective, of so many bytes where they are given.
        join: whether to join collectives, too.
        bytes_more: that may be held at the peak, over what the graph holds as it is.
    """

    def milliseconds(node: fx.Node, size: int | None) -> float | None:
        found = seconds(node, size)
        return None if found is None else 1e3 * found

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
    # It asks a GPU for its rates before it takes our prices instead of what they say.
    with mock.patch.object(passes, "estimate_roofline_runtime_ms", return_value=0.0):
        pass_of_torch(graph, **{name: value for name, value in options.items() if name in known})


def has_symmetric_memory(group: str) -> bool:
    """Whether a process group has symmetric memory, and this release of torch fuses products with its collectives."""
    try:
        from torch.distributed._symmetric_memory import is_symm_mem_enabled_for_group  # of a group by its name
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
    found: Callable[[fx.Graph], None] = micro_pipeline_tp_pass
    return found


def fuse_products(graph: fx.Graph) -> None:
    """Fuse products with collectives over groups that have symmetric memory, by torch's pass."""
    pass_of_torch = _fuse_products()
    assert pass_of_torch is not None, "no group has symmetric memory"
    pass_of_torch(graph)
    graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
    for node in graph.nodes:
        if node.op == "call_function" and "val" not in node.meta:
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), _fake)
            mode = next(one.meta["val"].fake_mode for one in graph.nodes if isinstance(one.meta.get("val"), FakeTensor))
            with mode, torch.no_grad():
                node.meta["val"] = node.target(*args, **kwargs)


def _fake(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def memory_of(tensor: torch.Tensor) -> int:
    """Return a number that is equal for tensors that lie in the same memory, with or without numbers."""
    return int(tensor.untyped_storage()._cdata)
