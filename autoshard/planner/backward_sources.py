"""How the backward half gets values of the forward half: bytes by module, for the account of a plan.

Values that are kept, on the device or on the host, are counted in the program (`ProgramEstimate.footprint`). Recomputed
values are counted here, from the decisions: copies that are gathered again, and results of operators that run again.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping

from torch import fx

from autoshard.capture.backward_copies import RECOMPUTES
from autoshard.capture.offloading import base_in_memory
from autoshard.memory.footprint import SOURCES, Source
from autoshard.patterns.decisions import Flow
from autoshard.patterns.graph_rules import Value, uncast, value_of
from autoshard.planner.account import StepAccount, StepReshard, value_uses
from autoshard.specs.layout import local_shape
from autoshard.specs.spec import Spec


def backward_sources(account: StepAccount, kept: Mapping[str, Mapping[Source, int]]) -> dict[str, dict[str, int]]:
    """Return the bytes of values of the forward half that the backward half reads, as in `Memory.sources`.

    Args:
        account: of the step.
        kept: path of a module -> bytes that are kept between the halves.
    """
    sums: dict[str, dict[Source, int]] = defaultdict(lambda: dict.fromkeys(SOURCES, 0))
    for path, of_module in kept.items():
        for source, size in of_module.items():
            sums[path][source] += size
    for path, size in _gathered_again(account):
        sums[path]["gathered again"] += size
    for path, size in _run_again(account.flow):
        sums[path]["run again"] += size
    return {
        path: {source: size for source, size in of_module.items() if size} for path, of_module in sorted(sums.items())
    }


def _gathered_again(account: StepAccount) -> Iterator[tuple[str, int]]:
    """Yield module and bytes of the copies in the backward half of values that both halves gather."""
    flow, gathers = account.flow, defaultdict[str, list[StepReshard]](list)
    for reshard in account.reshards:
        if not reshard.gradient and any(step.kind == "all_gather" for step in reshard.path.steps):
            gathers[reshard.phase].append(reshard)
    before = {_origin(reshard.value) for reshard in gathers["forward"]}
    # No operator reads a copy that is only gathered further.
    read = {(use.value, use.target) for use in value_uses(flow) if use.phase == "backward"}
    for reshard in gathers["backward"]:
        target = reshard.path.target
        if _origin(reshard.value) in before and (reshard.value, target) in read:
            yield reshard.module, _local_bytes(flow, reshard.value, target)


def _origin(value: Value) -> tuple[str, int]:
    """Return name and result of the original operator or parameter of a value that may be recomputed or cast."""
    node = uncast(value.node)
    if node.op != "placeholder":
        node = value.node
    return node.meta.get(RECOMPUTES, node.name), value.result


def _run_again(flow: Flow) -> Iterator[tuple[str, int]]:
    """Yield module and bytes of results that run again, except those read only by operators that run again."""
    read: dict[fx.Node, None] = {}
    for node in flow.rules.operators:
        if flow.graph.phase(node) == "backward" and RECOMPUTES not in node.meta:
            # A recomputed view of a kept value allocates nothing.
            read |= dict.fromkeys(map(base_in_memory, node.all_input_nodes))
    for node in read:
        if RECOMPUTES in node.meta:
            value = value_of(node)
            yield flow.graph.module_path(value.node), _local_bytes(flow, value, flow.produced_spec(value))


def _local_bytes(flow: Flow, value: Value, spec: Spec) -> int:
    return math.prod(local_shape(value.meta.shape, spec, flow.mesh)) * value.meta.dtype.itemsize
