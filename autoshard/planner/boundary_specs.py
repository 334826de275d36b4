"""Specs of tensors outside the step: parameters, buffers, inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Replicate, Shard

from autoshard.capture.joint import JointInput
from autoshard.errors import HintError
from autoshard.patterns.graph_rules import GraphRules, Value, value_of
from autoshard.patterns.rule import Rule
from autoshard.planner.planning_problem import Constraints
from autoshard.planner.strategy_tables import StrategyTables
from autoshard.planner.task_graph_restrictions import Restrictions
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import names_with_batch, part_of_rows, row_placements
from autoshard.specs.layout import canonical, dim_of, is_even, is_placeable
from autoshard.specs.spec import Spec, is_shard, split_factor_of


@dataclass(frozen=True, slots=True)
class BoundarySpecs:
    """The specs that the plan may choose for parameters, buffers, inputs and outputs.

    Attributes:
        rules: the graph and its rules.
        tables: the strategies of the rules, and the mesh.
        constraints: pinned and forced parameters.
        restrictions: restrictions by task graphs.
    """

    rules: GraphRules
    tables: StrategyTables
    constraints: Constraints
    restrictions: Restrictions

    @property
    def mesh(self) -> MeshShape:
        return self.tables.mesh

    def of_input(self, source: JointInput) -> list[Spec]:
        """Return the possible specs of a placeholder before the step."""
        constraints, value, name = self.constraints, Value(source.node), source.name
        rule = self.rules.rules[source.node]
        if source.kind == "tangent":
            # The gradient of an output has the output's spec; the problem ties both.
            if name in constraints.outputs:
                return [constraints.outputs[name]]
            specs = self._open_specs(rule, constraints.planned_outputs)
            return [spec for spec in specs if is_boundary_spec(value, spec, self.mesh)]
        # The last resort, if no spec of the rule satisfies the pins: whole on all other axes.
        pinned = constraints.pinned.get(name, (None,) * self.mesh.ndim)
        pinned_spec = Spec.of(*(placement or Replicate() for placement in pinned))
        if None not in pinned:
            return [pinned_spec]
        is_open = source.kind == "parameter" or (source.kind == "input" and name in constraints.pinned)
        specs = [
            spec
            for spec in _with_plain_shards(self._open_specs(rule, is_open))
            if is_storage_spec(value, spec, self.mesh) and not self._has_uneven_shares(value, spec)
        ]
        if source.kind == "input":
            # Such as a cache, whose rows are written in place: shards with padding would be copied.
            specs = [spec for spec in specs if is_even(value.meta.shape, spec, self.mesh)]
        allowed = [
            spec
            for spec in specs
            if all(pin is None or pin == placement for pin, placement in zip(pinned, spec, strict=True))
        ]
        sharding = self.restrictions.sharded_parameters.get(name, ())
        # A restriction is a preference, unlike a pin: it is dropped if no spec satisfies it.
        allowed = [spec for spec in allowed if all(axis in spec.shard_axes for axis in sharding)] or allowed
        allowed = allowed or [pinned_spec]
        if name not in constraints.forced:
            return allowed
        # A parameter that cannot be sharded is replicated: memory has to be saved elsewhere.
        return [spec for spec in allowed if spec.shard_axes] or self._uneven_specs(value) or allowed

    def of_output(self, name: str, node: fx.Node) -> list[Spec]:
        """Return the specs in which an output may be returned."""
        value = value_of(node)
        if name in self.constraints.outputs:
            return [self.constraints.outputs[name]]
        if not self.constraints.planned_outputs:
            return [Spec.all_replicated(self.mesh.ndim)]
        specs = self.tables.options(self.rules.rules[value.node]).results[value.result].distinct
        return [spec for spec in specs if not spec.partial_axes and is_boundary_spec(value, spec, self.mesh)]

    def _has_uneven_shares(self, value: Value, spec: Spec) -> bool:
        """Return True if ranks would hold shares of a tensor, or blocks that do not divide the shared size."""
        # No `DTensor` has such shards, and tensors outside of the step are DTensors.
        shared, shape = self.constraints.shared, value.meta.shape
        if shared is None:
            return False
        blocks: dict[int, int] = {}
        for axis in spec.shard_axes:
            dim = dim_of(spec[axis], len(shape))
            strided = split_factor_of(spec[axis]) > 1  # its factor may be the shared size, which calls change
            if shared.is_of_whole(shape[dim]) and (strided or axis == shared.axis):
                return True
            blocks[dim] = blocks.get(dim, 1) * self.mesh.sizes[axis]
        return not all(shared.is_multiple(shape[dim], count) for dim, count in blocks.items())

    def _uneven_specs(self, value: Value) -> list[Spec]:
        """Return shards of a tensor that no axis divides: its storage is split, and its uses gather it."""
        replicated = Spec.all_replicated(self.mesh.ndim)
        specs = [
            replicated.replace(axis, Shard(dim))
            for axis, size in enumerate(self.mesh.sizes)
            for dim, length in enumerate(value.meta.shape)
            if 1 < size <= length
        ]
        return [spec for spec in specs if not self._has_uneven_shares(value, spec)]

    def _open_specs(self, rule: Rule, is_open: bool) -> list[Spec]:
        if not is_open:
            return [Spec.all_replicated(self.mesh.ndim)]
        return list(self.tables.options(rule).results[0].distinct)


def row_outputs(rules: GraphRules, mesh: MeshShape, axes: Sequence[int]) -> dict[str, Spec]:
    """Return the specs of outputs with a batch dim if axes split it, by name.

    Raises:
        HintError: an output has the batch and other dims in one, and the axes do not divide the batch.
    """
    outputs = rules.graph.tensor_outputs
    inputs = {source.name: Value(source.node).meta.shape for source in rules.graph.inputs if source.kind == "input"}
    batch = next((int(inputs[name][0]) for name in names_with_batch(inputs)), 1)
    names, dims = [mesh.names[axis] for axis in axes], rules.batch_dims(outputs.values())
    if batch == 1:
        # Dims of size 1 are not propagated: in a batch of one, an output whose first dim is 1 has the batch there.
        shapes = {node: value_of(node).meta.shape for node in outputs.values()}
        dims = {node: 0 for node, shape in shapes.items() if shape and shape[0] == 1}
    parts = part_of_rows(mesh, names, (0,) * mesh.ndim)[0]
    specs = {}
    for name, node in outputs.items():
        if node not in dims:
            continue
        shape, dim = value_of(node).meta.shape, dims[node]
        if int(shape[dim]) != batch and batch % parts:
            raise HintError(
                f'outputs="local": dim {dim} of {name} has the samples and more in one ({shape[dim]} for a batch of '
                f"{batch}), and {parts} ranks with unequal numbers of samples do not cut it between them. Return it "
                "unflattened, or pass batches that the data axes divide."
            )
        specs[name] = canonical(shape, Spec.of(*row_placements(mesh, names, dim)), mesh)
    return specs


def is_boundary_spec(value: Value, spec: Spec, mesh: MeshShape) -> bool:
    """Return True if inputs, outputs and their gradients can have a spec: torch supports it, even with empty shards."""
    return not (spec.has_blocks or spec.partial_axes or spec.is_routed) and is_placeable(value.meta.shape, spec, mesh)


def is_storage_spec(value: Value, spec: Spec, mesh: MeshShape) -> bool:
    """Return True if a tensor can have a spec outside the step: torch supports it, and no rank has an empty shard."""
    shape = value.meta.shape
    long = all(shape[dim_of(spec[axis], len(shape))] >= mesh.sizes[axis] for axis in spec.shard_axes)
    splits = [(placement.dim, split_factor_of(placement)) for placement in spec if is_shard(placement)]  # type: ignore[attr-defined]
    dims = [dim for dim, _ in splits]
    # `DTensor.full_tensor` is wrong for a dim that several axes split, one of them strided.
    is_plain = all(factor == 1 or dims.count(dim) == 1 for dim, factor in splits)
    return is_plain and not spec.has_blocks and (long or is_even(shape, spec, mesh))


def _with_plain_shards(specs: Sequence[Spec]) -> list[Spec]:
    """Return the specs, and their variants with plain shards for strided ones."""
    # A strided shard needs a copy to be gathered, a plain one does not: at rest the plain one may be cheaper.
    known = dict.fromkeys(specs)
    for spec in specs:
        dims = [placement.dim for placement in spec if is_shard(placement)]  # type: ignore[attr-defined]
        if len(set(dims)) == len(dims):
            plain = (Shard(placement.dim) if is_shard(placement) else placement for placement in spec)  # type: ignore[attr-defined]
            known[Spec.of(*plain)] = None
    return list(known)
