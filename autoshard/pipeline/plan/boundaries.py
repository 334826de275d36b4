"""Tensors between stages: their placements on the mesh of a stage, and the part that each rank sends."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import Placement, Replicate
from torch.utils import _pytree as pytree

from autoshard.capture.call_layout import call_layout
from autoshard.cluster.worker_shares import apportion
from autoshard.errors import PlanError
from autoshard.pipeline.graph.microbatch import BATCH
from autoshard.pipeline.graph.stage_modules import BoundaryTensor, StageModule
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.size import DynamicSize, symbol
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of, is_even, local_shape
from autoshard.specs.shared_axis import SharedAxis
from autoshard.specs.spec import Spec, is_shard

Tensors = tuple[torch.Tensor, ...]


class Boundaries:
    """Boundaries between stages.

    A stage with a plan for whole inputs takes whole tensors from the stage before; one with a plan for local inputs
    takes them in the placements in which the stage before leaves them, so that only shards cross.

    Args:
        plans: of all stages.
        mesh: of one stage.
        coordinate: of this rank on that mesh; needed where ranks take unequal shares.
    """

    def __init__(self, plans: Sequence[ShardingPlan], mesh: MeshShape, coordinate: Sequence[int] = ()) -> None:
        self._plans = plans
        self._mesh = mesh
        self._coordinate = coordinate

    def messages(self, stage: StageModule) -> tuple[Tensors, Tensors]:
        """Return the tensors that this rank receives for a stage, and those that it returns, on the meta device.

        Raises:
            PlanError: two stages disagree on the placements of a tensor between them, or ranks would have unequal
                parts of it.
        """
        inputs, outputs = self._input_placements(stage), self._output_placements(stage.index, len(stage.passed))
        if stage.index:
            sent = self._output_placements(stage.index - 1, len(stage.received))
            for value, sent_as, taken_as in zip(stage.received, sent, inputs, strict=True):
                if sent_as != taken_as and not all(place.is_replicate() for place in (*sent_as, *taken_as)):
                    raise PlanError(
                        f"stage {stage.index - 1} leaves {value.name} as {Spec.of(*sent_as)}, and stage {stage.index} "
                        f"takes it as {Spec.of(*taken_as)}: plan them so that they agree."
                    )
        returned = self._local_tensors(stage.index, stage.passed, outputs) if stage.passed else stage.returned
        return self._local_tensors(stage.index, stage.received, inputs), returned

    def _input_placements(self, stage: StageModule) -> list[tuple[Placement, ...]]:
        """Return the placements in which a stage takes the tensors that it receives."""
        received, _ = stage.example
        whole = Spec.all_replicated(self._mesh.ndim).placements
        if self._plans[stage.index].options.get("inputs") != "local":
            return [whole] * len(received)
        placements = self._plans[stage.index].input_placements
        return [placements.get(name, whole) for name in input_names(stage)[: len(received)]]

    def _output_placements(self, index: int, count: int) -> list[tuple[Placement, ...]]:
        """Return the placements in which a stage leaves the tensors that it hands on."""
        placements = self._plans[index].output_placements
        whole = Spec.all_replicated(self._mesh.ndim).placements
        return [placements.get(f"output[{place}]", whole) for place in range(count)]

    def _local_tensors(
        self, index: int, values: Sequence[BoundaryTensor], placements: Sequence[tuple[Placement, ...]]
    ) -> Tensors:
        return tuple(self._local_tensor(index, *pair) for pair in zip(values, placements, strict=True))

    def _local_tensor(self, index: int, value: BoundaryTensor, placements: tuple[Placement, ...]) -> torch.Tensor:
        """Return this rank's part of a value that a stage takes or gives."""
        spec, like, (shared, proportions) = Spec.of(*placements), value.like, self._shared_axis(index)
        if not parts_are_equal(value.shape, spec, self._mesh, shared):
            raise PlanError(
                f"{value.name} goes from stage to stage as {spec} on the mesh {self._mesh}, which does not part "
                f"{list(like.shape)} evenly: messages have one size on all ranks. Choose a number of samples that the "
                f"mesh divides, or plan whole boundaries."
            )
        shape = list(local_shape(tuple(like.shape), spec, self._mesh))
        dim = None if shared is None else dim_in_shares(value.shape, spec, shared)
        if dim is not None and shared is not None:
            # The dim is a multiple of the samples; of these the rank has its share.
            size = value.shape[dim]
            assert isinstance(size, DynamicSize)
            samples = size.sizes[shared.whole]
            shape[dim] = int(size) // samples * apportion(samples, proportions)[self._coordinate[shared.axis]]
        return torch.empty(shape, dtype=like.dtype, device="meta", requires_grad=like.requires_grad)

    def _shared_axis(self, index: int) -> tuple[SharedAxis | None, tuple[int, ...]]:
        """Return the axis whose ranks take unequal shares in a stage, if there is one, and their proportions."""
        for axis, proportions in self._plans[index].shares.items():
            return SharedAxis(self._mesh.index(axis), len(proportions), symbol(BATCH)), proportions
        return None, ()


def dim_in_shares(shape: Sequence[int], spec: Spec, shared: SharedAxis) -> int | None:
    """Return the dim of a value that is sharded in shares of the samples; None if there is none."""
    placement = spec.placements[shared.axis]
    dim = dim_of(placement, len(shape)) if is_shard(placement) else None
    return dim if dim is not None and shared.is_of_whole(shape[dim]) else None


def parts_are_equal(shape: Sequence[int], spec: Spec, mesh: MeshShape, shared: SharedAxis | None) -> bool:
    """Return True if all ranks have equal parts of a value, or parts in proportion to their shares of the samples.

    Args:
        shape: of the value, with dynamic sizes.
        spec: of the value.
        mesh: of a stage.
        shared: the axis whose ranks take unequal shares, if there is one.
    """
    dim = None if shared is None else dim_in_shares(shape, spec, shared)
    if dim is not None and shared is not None:
        rest = [Replicate() if axis == shared.axis else place for axis, place in enumerate(spec.placements)]
        if any(is_shard(place) and dim_of(place, len(shape)) == dim for place in rest):
            return False  # another axis would split the shares further
        spec = Spec.of(*rest)
    return is_even(tuple(map(int, shape)), spec, mesh)


def input_names(stage: StageModule) -> list[str]:
    """Return the names of a stage's inputs as its plan has them, received ones first."""
    leaves, structure = pytree.tree_flatten(stage.example)
    return [str(name) for name in call_layout(stage.module, structure, leaves).leaves]
