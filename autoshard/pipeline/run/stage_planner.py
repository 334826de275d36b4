"""The planner of a stage, whose step is a slice of the whole module's step."""

from __future__ import annotations

from typing import Any

from autoshard.options.target import Target
from autoshard.pipeline.graph.stage_slices import StageModule
from autoshard.planner.module_planner import ModulePlanner
from autoshard.planner.planning import CapturedCall
from autoshard.planner.regions import with_regions
from autoshard.planner.target_constraints import PinsByName, PlacementsByName
from autoshard.specs.axes import MeshShape


class StageStepPlanner(ModulePlanner):
    """Plans the only call of a stage.

    Args:
        stage: the stage.
        mesh: the mesh axes of its ranks.
        target: the user's options.
    """

    def __init__(self, stage: StageModule, mesh: MeshShape, target: Target) -> None:
        super().__init__(stage.module, mesh, target)
        # Applies hints and marks in the model's code about recomputed or kept values.
        self._step = with_regions(stage.step, None, ())

    def capture(
        self, *_: Any, placed: PlacementsByName | None = None, input_pins: PinsByName | None = None, **options: Any
    ) -> CapturedCall:
        """Return the stage's call; other arguments of a capture are those with which the stage was cut."""
        return CapturedCall(self._step, 0.0, self.mesh, self.requested, self._planners, placed, input_pins or {})
