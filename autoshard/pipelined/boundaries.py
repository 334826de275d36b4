"""What goes from stage to stage: how it lies on the mesh of a stage, and what of it one rank sends to its like."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Placement
from torch.utils import _pytree as pytree

from autoshard.capture.calls import call_layout
from autoshard.errors import PlanError
from autoshard.pipeline.cut import StageModule
from autoshard.plan import ShardingPlan
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import is_even, local_shape
from autoshard.specs.spec import Spec

Tensors = tuple[torch.Tensor, ...]


class Boundaries:
    """Boundaries between stages.

    A stage whose plan is for whole inputs takes whole tensors from the stage before; one that is planned for local
    inputs takes them as the stage before leaves them, so that only shards cross.

    Args:
        plans: of all stages.
        mesh: of one stage.
    """

    def __init__(self, plans: Sequence[ShardingPlan], mesh: MeshShape) -> None:
        self._plans = plans
        self._mesh = mesh

    def messages(self, stage: StageModule) -> tuple[Tensors, Tensors]:
        """What a rank receives for a stage, and what the stage returns there: tensors on the meta device.

        Raises:
            PlanError: two stages disagree on how what the one gives the other lies, or ranks would not have equally
                much of it.
        """
        received, _ = stage.example
        taken, given = self._taken(stage), self._given(stage.index, len(stage.passed))
        if stage.index:
            sent = self._given(stage.index - 1, len(received))
            for value, one, other in zip(stage.received, sent, taken, strict=True):
                if one != other:
                    raise PlanError(
                        f"stage {stage.index - 1} leaves {value.name} as {Spec.of(*one)}, and stage {stage.index} "
                        f"takes it as {Spec.of(*other)}: plan them so that they agree."
                    )
        names = [value.name for value in stage.received]
        returned = stage.returned
        if stage.passed:
            returned = self._local([value.name for value in stage.passed], returned, given)
        return self._local(names, received, taken), returned

    def _takes_shards(self, index: int) -> bool:
        return self._plans[index].options.get("inputs") == "local"

    def _taken(self, stage: StageModule) -> list[tuple[Placement, ...]]:
        """How a stage takes what it receives."""
        received, _ = stage.example
        whole = Spec.replicated(self._mesh.ndim).placements
        if not self._takes_shards(stage.index):
            return [whole] * len(received)
        placements = self._plans[stage.index].input_placements
        return [placements.get(name, whole) for name in names_of(stage)[: len(received)]]

    def _given(self, index: int, count: int) -> list[tuple[Placement, ...]]:
        """How a stage leaves what it hands on."""
        placements = self._plans[index].output_placements
        whole = Spec.replicated(self._mesh.ndim).placements
        return [placements.get(f"output[{place}]", whole) for place in range(count)]

    def _local(
        self, names: Sequence[str], likes: Sequence[torch.Tensor], placements: Sequence[tuple[Placement, ...]]
    ) -> Tensors:
        return tuple(self._part(*one) for one in zip(names, likes, placements, strict=True))

    def _part(self, name: str, like: torch.Tensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        spec = Spec.of(*placements)
        if not is_even(tuple(like.shape), spec, self._mesh):
            raise PlanError(
                f"{name} goes from stage to stage as {spec} on the mesh {self._mesh}, which does not part "
                f"{list(like.shape)} evenly: messages have one size on all ranks. Choose a number of samples that the "
                f"mesh divides, or plan whole boundaries."
            )
        shape = local_shape(tuple(like.shape), spec, self._mesh)
        return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)


def names_of(stage: StageModule) -> list[str]:
    """Names of what a stage takes, what it receives first, as its plan has them."""
    leaves, structure = pytree.tree_flatten(stage.example)
    return [str(name) for name in call_layout(stage.module, structure, leaves).leaves]
