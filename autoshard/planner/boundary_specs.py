"""How tensors may lie outside the step: what is given to it, and what it hands back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed.tensor import Placement, Replicate, Shard

from autoshard.capture.joint import JointInput, JointOutput
from autoshard.patterns.graph_rules import GraphRules, Value, value_of
from autoshard.patterns.rule import Rule
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.planner.task_graph_restrictions import Restrictions
from autoshard.specs.axes import MeshShape
from autoshard.specs.layout import dim_of, is_even, is_placeable
from autoshard.specs.spec import Spec, is_shard, split_factor_of


@dataclass(frozen=True, slots=True)
class BoundarySpecs:
    """The specs that are open to inputs, parameters and outputs.

    Attributes:
        rules: of the graph.
        tables: strategies of its rules, and the mesh.
        wishes: what is pinned and forced.
        restrictions: what task graphs ask for.
    """

    rules: GraphRules
    tables: StrategyTables
    constraints: Constraints
    restrictions: Restrictions

    @property
    def mesh(self) -> MeshShape:
        return self.tables.mesh

    def of_input(self, source: JointInput) -> list[Spec]:
        """The specs in which a placeholder may lie before the step."""
        wishes, value = self.constraints, Value(source.node)
        pinned = wishes.pinned.get(source.name, (None,) * self.mesh.ndim)
        rule = self.rules.rules[source.node]
        if source.kind == "tangent":
            name = source.name
            if name in wishes.outputs:
                return [wishes.outputs[name]]
            return [s for s in self._open_specs(rule, wishes.planned_outputs) if is_boundary_spec(value, s, self.mesh)]
        if all(placement is not None for placement in pinned):
            return [Spec.of(*(placement or Replicate() for placement in pinned))]
        if source.kind == "input" and wishes.local_inputs:
            candidates = self._leading_specs(value)
        else:
            opened = _with_plain_shards(self._open_specs(rule, source.kind == "parameter"))
            candidates = [
                s for s in opened if is_storage_spec(value, s, self.mesh) and not self._has_uneven_shares(value, s)
            ]
        allowed = [spec for spec in candidates if _agrees_with_pins(spec, pinned)]
        apart = self.restrictions.sharded_parameters.get(source.name, ())
        allowed = [spec for spec in allowed if all(axis in spec.shard_axes for axis in apart)] or allowed
        if not allowed:
            allowed = [Spec.of(*(placement or Replicate() for placement in pinned))]
        if source.name in wishes.forced:
            sharded = [spec for spec in allowed if spec.shard_axes]
            allowed = sharded or self._uneven_specs(value) or allowed
        return allowed

    def of_output(self, output: JointOutput) -> list[Spec]:
        """The specs in which an output may be handed back."""
        assert output.node is not None
        value = value_of(output.node)
        if output.name in self.constraints.outputs:
            return [self.constraints.outputs[output.name]]
        if not self.constraints.planned_outputs:
            return [Spec.all_replicated(self.mesh.ndim)]
        made = self.tables.options(self.rules.rules[value.node]).results[value.result].distinct
        return [spec for spec in made if not spec.partial_axes and is_boundary_spec(value, spec, self.mesh)]

    def _has_uneven_shares(self, value: Value, spec: Spec) -> bool:
        """Whether ranks would hold shares of their own of a tensor, or blocks of no number of what is shared: no
        `DTensor` lies so."""
        shared, shape = self.constraints.shared, value.meta.shape
        if shared is None:
            return False
        blocks: dict[int, int] = {}
        for axis in spec.shard_axes:
            dim = dim_of(spec[axis], len(shape))
            strided = split_factor_of(spec[axis]) > 1  # by a number that may be what is shared
            if shared.is_of_whole(shape[dim]) and (strided or axis == shared.axis):
                return True
            blocks[dim] = blocks.get(dim, 1) * self.mesh.sizes[axis]
        return not all(shared.is_multiple(shape[dim], count) for dim, count in blocks.items())

    def _uneven_specs(self, value: Value) -> list[Spec]:
        """Shards of a tensor that no axis divides: its storage is split, its uses gather it."""
        replicated = Spec.all_replicated(self.mesh.ndim)
        specs = [
            replicated.replace(axis, Shard(dim))
            for axis, size in enumerate(self.mesh.sizes)
            for dim, length in enumerate(value.meta.shape)
            if 1 < size <= length
        ]
        return [spec for spec in specs if not self._has_uneven_shares(value, spec)]

    def _open_specs(self, rule: Rule, open_: bool) -> list[Spec]:
        if not open_:
            return [Spec.all_replicated(self.mesh.ndim)]
        return list(self.tables.options(rule).results[0].distinct)

    def _leading_specs(self, value: Value) -> list[Spec]:
        """Shards of the first dim over some of the axes: what a data loader can yield."""
        specs = [Spec.all_replicated(self.mesh.ndim)]
        for axis in range(self.mesh.ndim):
            specs += [spec.replace(axis, Shard(0)) for spec in specs if self.mesh.sizes[axis] > 1]
        return [
            spec for spec in specs if value.meta.shape and is_placeable(value.meta.shape, spec, self.mesh)
        ] or specs[:1]


def is_boundary_spec(value: Value, spec: Spec, mesh: MeshShape) -> bool:
    """Whether inputs, outputs and their gradients may lie so: as torch can say it; the last shards may be empty."""
    return not (spec.has_blocks or spec.partial_axes or spec.is_routed) and is_placeable(value.meta.shape, spec, mesh)


def is_storage_spec(value: Value, spec: Spec, mesh: MeshShape) -> bool:
    """Whether a tensor may lie so outside the step: as torch can say it, and so long that no rank holds nothing."""
    shape = value.meta.shape
    long = all(shape[dim_of(spec[axis], len(shape))] >= mesh.sizes[axis] for axis in spec.shard_axes)
    return _is_plain_nest(spec) and not spec.has_blocks and (long or is_even(shape, spec, mesh))


def _is_plain_nest(spec: Spec) -> bool:
    """Whether no dim is split by several axes one of which is strided: `DTensor.full_tensor` gathers such wrongly."""
    splits = [(placement.dim, split_factor_of(placement)) for placement in spec if is_shard(placement)]  # type: ignore[attr-defined]
    dims = [dim for dim, _ in splits]
    return all(factor == 1 or dims.count(dim) == 1 for dim, factor in splits)


def _with_plain_shards(specs: Sequence[Spec]) -> list[Spec]:
    """The specs, and those with a plain shard for a strided one: to gather it takes no copy."""
    known = dict.fromkeys(specs)
    for spec in specs:
        dims = [one.dim for one in spec if is_shard(one)]  # type: ignore[attr-defined]
        if len(set(dims)) == len(dims):
            known[Spec.of(*(Shard(one.dim) if is_shard(one) else one for one in spec))] = None  # type: ignore[attr-defined]
    return list(known)


def _agrees_with_pins(spec: Spec, pinned: Sequence[Placement | None]) -> bool:
    return all(want is None or want == have for want, have in zip(pinned, spec, strict=True))
