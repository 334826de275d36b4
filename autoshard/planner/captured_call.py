"""A captured call of a module, and the planners of its graph."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from autoshard.capture.joint import JointGraph, capture
from autoshard.options.target import Target
from autoshard.patterns.parts import Loop, with_unequal_loops
from autoshard.planner.planner import Planner
from autoshard.planner.planning import PlannerCache
from autoshard.planner.progress_line import Progress, show_progress
from autoshard.planner.target_constraints import PlacementsByName, shared_axis
from autoshard.specs.axes import MeshShape


def capture_with_progress(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Target,
    *,
    grad: bool,
    tangents: Literal["loss", "all"] = "loss",
    dynamic: bool = True,
    quiet: bool = False,
) -> tuple[JointGraph, float]:
    """Return the graph of a call and the seconds of its capture, with a line about it on a terminal.

    Args:
        module, args, kwargs, grad, tangents: as for `capture`.
        target: the options.
        dynamic: True if the sizes that the options name are dynamic.
        quiet: True to show nothing: another rank captures the same.
    """
    start = time.perf_counter()
    line = show_progress(target.options.search.verbose, f"capture of {type(module).__name__}")
    with contextlib.nullcontext() if quiet else line as report:

        def report_part(part: str) -> None:
            if report is not None:
                report(Progress(part, math.inf, -math.inf, time.perf_counter() - start))

        graph = capture(
            module,
            args,
            kwargs,
            grad=grad,
            tangents=tangents,
            dynamic=target.dynamic if dynamic else None,
            mp_policy=target.options.mp_policy,
            progress=report_part,
        )
    return graph, time.perf_counter() - start


@dataclass(eq=False)
class CapturedCall:
    """A captured call.

    Attributes:
        graph: the captured step.
        seconds: the time of its capture.
        mesh: the mesh axes.
        target: the options of the user.
        planner_cache: makes planners, which share their tables of operators and tensors.
        placed: placements of parameters and buffers that stay; None for the first call of a module.
        placed_inputs: placements of local inputs that an earlier call asked for.
    """

    graph: JointGraph
    seconds: float
    mesh: MeshShape
    target: Target
    planner_cache: PlannerCache
    placed: PlacementsByName | None = None
    placed_inputs: PlacementsByName = field(default_factory=dict)
    _planners: list[Planner] = field(default_factory=list)
    _in_parts: dict[Hashable, JointGraph] = field(default_factory=dict)

    def graph_in_parts(self, loops: Sequence[Loop], parts: int) -> JointGraph:
        """Return the graph with some loops in equal parts, of which ranks can take unequal numbers; made once.

        Raises:
            RuleError: an argument of an operator is a size that its dims no longer have.
        """
        key = tuple(loops), parts
        if key not in self._in_parts:
            self._in_parts[key] = with_unequal_loops(self.graph, self.mesh, loops, parts)
        return self._in_parts[key]

    def planner_of(self, target: Target, graph: JointGraph | None = None) -> Planner:
        """Return the planner of the graph at some prices and limits; made once.

        Args:
            target: the target of the plan.
            graph: the graph with dims in equal parts, in place of the captured one.

        Raises:
            HintError: a hint does not fit the module or the mesh.
        """
        graph = self.graph if graph is None else graph
        # A planner depends on nothing else of a target: the other options are those of the call.
        prices = shared_axis(graph, self.mesh, target), target.cluster, target.settings
        for planner in self._planners:
            known_prices = planner.constraints.shared, planner.cluster, planner.settings
            if planner.graph is graph and known_prices == prices:
                return planner
        self._planners.append(self.planner_cache.of(graph, target, self.placed, self.placed_inputs))
        return self._planners[-1]
