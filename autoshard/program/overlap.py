"""Arrangement of the collectives of a local program: by this library, or by torch's passes at the cluster's prices.

Where a process group has symmetric memory, torch's passes also fuse products with the collectives beside them.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import fx

from autoshard.errors import PlanError
from autoshard.program._torch import fuse_products, has_overlap_pass, has_symmetric_memory, schedule_overlap
from autoshard.program.program_replay import COLLECTIVE_KINDS, KernelPrices, collective_call
from autoshard.reshard.collective_schedule import GATHERED_BYTES, REDUCED_BYTES, schedule
from autoshard.reshard.reductions import bucket_reductions, is_border
from autoshard.specs.emitter import collectives

aten = torch.ops.aten

_GATHER = collectives.all_gather_into_tensor.default
_SCATTER = collectives.reduce_scatter_tensor.default
_WAIT = collectives.wait_tensor.default
_RESHAPES = (aten.view.default, aten.reshape.default)


def fuse(graph: fx.Graph) -> None:
    """Fuse the products of half a program in place, where groups of it have symmetric memory.

    Torch's pass (`_micro_pipeline_tp`) computes a product piece by piece while the next piece of its operand is
    gathered, or the last piece of its result is reduced. It knows a gather along another dim than the first by a split
    and a `cat`; a program has a view, a permutation and a copy there, which are the same copy.
    """
    starts = [node for node in graph.nodes if node.target in (_GATHER, _SCATTER)]
    fusible = [node for node in starts if has_symmetric_memory(str(node.args[-1]))]
    if not fusible:
        return
    gathers = [_DimGather.find(start) for start in fusible if start.target is _GATHER]
    rewritten = [(gather, gather.rewrite_as_cat(graph)) for gather in gathers if gather is not None]
    # The pass knows no views.
    for node in graph.find_nodes(op="call_function", target=aten.view.default):
        node.target = aten.reshape.default
    fuse_products(graph)
    for gather, whole in rewritten:
        # The pass has not fused it. Where no copy was needed, a view costs less than the `cat`.
        if whole.users and not gather.copies:
            gather.rewrite_as_view(graph, whole)


@dataclass(frozen=True, slots=True, eq=False)
class _DimGather:
    """A gather along another dim than the first, as a program has it.

    Attributes:
        wait: for the pieces, one behind the other along the first dim.
        result: the whole tensor.
        dim: the dim of it along which the pieces lie.
        copies: True if the program copies pieces there; otherwise the dims before are of size one.
    """

    wait: fx.Node
    result: fx.Node
    dim: int
    copies: bool

    @staticmethod
    def find(gather: fx.Node) -> _DimGather | None:
        """Return the gather that starts here; None where its pieces lie along the first dim, or in several blocks."""
        wait = _only_user(gather)
        block = tuple(gather.args[0].meta["val"].shape)  # type: ignore[union-attr]
        first = None if wait is None or wait.target is not _WAIT else _only_user(wait)
        if wait is None or first is None or first.target not in _RESHAPES:
            return None
        # A view of the pieces, and the permutation, copy and view that bring them to their places.
        chain = [first]
        while len(chain) < 4 and (user := _only_user(chain[-1])) is not None:
            chain.append(user)
        size = int(gather.args[1])  # type: ignore[arg-type]
        # The first dim needs no rewriting.
        for dim in range(1, len(block)):
            whole = (*block[:dim], size * block[dim], *block[dim + 1 :])
            if math.prod(block[:dim]) == 1 and _shape(first) == whole:
                return _DimGather(wait, first, dim, copies=False)
            if _is_reassembly(chain, (size, *block[:dim], 1, *block[dim:]), dim, whole):
                return _DimGather(wait, chain[3], dim, copies=True)
        return None

    def rewrite_as_cat(self, graph: fx.Graph) -> fx.Node:
        """Put the pieces together by a split and a `cat`, and return the whole tensor."""
        pieces = self.wait.meta["val"]
        block = _shape(self.wait.all_input_nodes[0].all_input_nodes[0])[0]

        def call(op: Any, *args: Any) -> fx.Node:
            node = graph.call_function(op, args)
            values = fx.node.map_arg(args, lambda source: source.meta["val"])
            with pieces.fake_mode, torch.no_grad():
                # Phase and layer stay those of the whole tensor.
                node.meta = {**self.result.meta, "val": op(*values)}
            return node

        with graph.inserting_before(self.result):
            parts = call(aten.split.Tensor, self.wait, block)
            each = [call(operator.getitem, parts, place) for place in range(len(parts.meta["val"]))]
            whole = call(aten.cat.default, each, self.dim)
        self.result.replace_all_uses_with(whole)
        graph.eliminate_dead_code(is_impure_node=is_border)
        return whole

    def rewrite_as_view(self, graph: fx.Graph, whole: fx.Node) -> None:
        """Make the whole tensor a view of the pieces again."""
        with graph.inserting_before(whole):
            view = graph.call_function(aten.view.default, (self.wait, list(_shape(whole))))
        view.meta = dict(whole.meta)
        whole.replace_all_uses_with(view)
        graph.eliminate_dead_code(is_impure_node=is_border)


def _is_reassembly(chain: list[fx.Node], opened: tuple[int, ...], dim: int, whole: tuple[int, ...]) -> bool:
    """Return True if calls view pieces as `opened`, permute the dim that counts them to its place, and copy them."""
    if len(chain) < 4 or _shape(chain[0]) != opened or _shape(chain[3]) != whole:
        return False
    order = [*range(1, dim + 2), 0, *range(dim + 2, len(opened))]
    permuted = chain[1].target is aten.permute.default and chain[1].args[1] == order
    return permuted and chain[2].target is aten.clone.default and chain[3].target in _RESHAPES


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


Overlap = Literal["own", "torch"]
OVERLAPS = ("own", "torch")


class Arrangement(Protocol):
    """Joins and orders the collectives of half a program in place, in one order on all ranks."""

    def __call__(self, half: fx.GraphModule, forward: bool) -> None: ...


def arrange_own(half: fx.GraphModule, forward: bool) -> None:
    """Arrange collectives by the passes that the predicted program has, too."""
    # Reductions of the forward half are not joined: a loss that is kept would keep the buffer of all its neighbours.
    if not forward:
        bucket_reductions(half.graph)
    schedule(half.graph)


def check_overlap(overlap: str) -> None:
    """Raise a `PlanError` if the option is unknown, or this release of torch has no such pass."""
    if overlap not in OVERLAPS:
        raise PlanError(f"overlap={overlap!r} is unknown: choose one of {', '.join(OVERLAPS)}.")
    if overlap == "torch" and not has_overlap_pass():
        raise PlanError(
            f'overlap="torch" needs schedule_overlap_bucketing of torch._inductor, with its hook for prices, and torch '
            f'{torch.__version__} has none: install torch 2.13, or leave overlap="own".'
        )


@dataclass(frozen=True, slots=True, eq=False)
class TorchArrangement:
    """Torch's `schedule_overlap_bucketing`, and before it `_micro_pipeline_tp` where a group has symmetric memory.

    Attributes:
        prices: of kernels and collectives.
        groups: for every mesh axis, the name of the process group in the program.
        dynamic: True if sizes are dynamic.
    """

    prices: KernelPrices
    groups: Sequence[str]
    dynamic: bool

    def __call__(self, half: fx.GraphModule, forward: bool) -> None:
        # Torch's joins and fusions write the sizes of the example into the program.
        if not self.dynamic:
            fuse(half.graph)
        schedule_overlap(half, self.seconds, join=not self.dynamic, bytes_more=GATHERED_BYTES + REDUCED_BYTES)

    def seconds(self, node: fx.Node, size: int | None) -> float | None:
        """Return the seconds of a call; of a collective as if it had `size` bytes, where torch asks for that."""
        if node.op != "call_function" or "val" not in node.meta:
            return None
        if node.target in COLLECTIVE_KINDS:
            sent = collective_call(node, self.groups)
            return self.prices.cost.collective(sent.kind, sent.bytes if size is None else size, sent.axis)
        free = node.target in (collectives.wait_tensor.default, operator.getitem)
        return 0.0 if free else self.prices.seconds(node)
