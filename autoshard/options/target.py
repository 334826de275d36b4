"""The target of a plan: a user's options for one graph on the available devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch.distributed.tensor import Placement

from autoshard.capture.dynamic import Dynamic
from autoshard.cluster.cluster import Cluster, default_cluster
from autoshard.errors import PlanError
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.options.options import Hints, Options, Placements, Shares
from autoshard.options.placements import INPUTS, Shapes, fill, names_reached
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.reshard.reductions import DeferredReduction
from autoshard.specs.axes import MeshShape
from autoshard.specs.data_axes import axes_of_rows, check_data_axes, find_data_axes, names_with_batch, row_placements


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of a plan, and options of its search.

    Attributes:
        memory_limit: bytes per device that the step's peak may reach; None for no limit.
        optimizer: the memory of the optimizer.
        method: one of `autoshard.options.METHODS`; "force" is "auto" without a limit, and meets a limit only by forcing
            the largest parameters to be sharded (Rhino 4.4).
        time_limit: seconds for the whole search.
        recompute: what the backward half may recompute, one of `autoshard.options.RECOMPUTE`.
        offload: what is moved to the host besides what hints name, one of `autoshard.options.OFFLOAD`.
        offload_optimizer: the parameters with optimizer state on the host: one of
            `autoshard.options.OFFLOAD_OPTIMIZER`, or their names, chosen by an earlier plan.
        host_memory: bytes of host memory that one device may use; None if unknown.
        effort: one of `autoshard.options.EFFORTS`; "fast" uses the first result of messages or segments on tied layers.
        work_limit: the solver's work limit for every problem, in its units of work, so that equal runs give equal
            plans, however busy the machine is; None for no limit.
        gradient_steps: the number of runs of the step, such as microbatches of a pipeline, whose gradients are summed
            before they are reduced; a reduction's price is divided by it.
        under_way: the number of runs of the step, such as microbatches of a pipeline, in flight at once, each with its
            saved tensors.
        reduced: the gradients that are reduced once for several runs; others are reduced in every run, at full price.
        holds_sums: True if a run holds the sums of earlier runs, and no other account includes them.
    """

    memory_limit: int | None = None
    optimizer: OptimizerMemory = field(default_factory=lambda: optimizer_memory(None, None, foreach=False))
    method: str = "auto"
    time_limit: float = 30.0
    recompute: str = "auto"
    offload: str = "none"
    offload_optimizer: str | frozenset[str] = "none"
    host_memory: int | None = None
    effort: str = "full"
    work_limit: int | None = None
    gradient_steps: int = 1
    under_way: int = 1
    reduced: DeferredReduction = "step"
    holds_sums: bool = False

    @property
    def left_unreduced(self) -> DeferredReduction | None:
        """The gradients that a run of the step does not reduce; None if it reduces all."""
        return self.reduced if self.gradient_steps > 1 else None

    @property
    def runs_per_reduction(self) -> int:
        """Runs of the step per reduction of a gradient, as assumed in the search."""
        # Gradients within a stage may be reduced in every microbatch, at full price.
        return self.gradient_steps if self.reduced == "step" else 1


@dataclass(frozen=True, slots=True)
class Target:
    """The target of one graph's plan.

    The targets of a pipeline stage, and of devices with shares, differ from the user's options, which do not change.

    Attributes:
        options: the user's options.
        cluster: the devices, with the compiler's prices if local programs are compiled.
        settings: limits, and options of the search.
        hints, inputs, outputs, input_placements, output_placements, dynamic, shares: as in `Options`.
        data_axes: the names of the axes along which ranks have different rows, in the order of the mesh; empty before
            `on_mesh`, and if inputs and outputs are global.
    """

    options: Options
    cluster: Cluster
    settings: Settings
    hints: Hints | None
    inputs: Literal["global", "local"]
    outputs: Literal["global", "local"]
    data_axes: tuple[str, ...]
    input_placements: Mapping[str, Any]
    output_placements: Placements
    dynamic: Dynamic | None
    shares: Shares | Literal["auto"] | None

    @staticmethod
    def of(options: Options, device_type: str | None) -> Target:
        """Return the target of a whole model on devices of a type; None if there are no devices yet.

        Raises:
            ClusterError: there is no such cluster.
            PlanError: the optimizer is unknown, or does not support state on the host.
        """
        cluster = default_cluster(device_type) if options.cluster is None else Cluster.of(options.cluster)
        # A compiler fuses kernels, which changes their prices.
        if options.compile:
            cluster = cluster.with_compiler
        # torch's optimizers update all parameters with one call per operator on accelerators, but one by one on CPUs.
        foreach = cluster.name != "cpu" if device_type is None else device_type != "cpu"
        search, shares = options.search, options.shares
        assert search.time_limit is not None, "options come from a function that has a time limit"
        optimizer = optimizer_memory(options.optimizer, options.optimizer_bytes_per_element, foreach)
        if options.offload_optimizer != "none" and optimizer.factored:
            raise PlanError(
                f"offload_optimizer={options.offload_optimizer!r} with optimizer={options.optimizer!r}: the host "
                "updates elements of shards, and rows and columns of Adafactor's state are of whole matrices. Plan for "
                'another optimizer, such as "adamw", or with offload_optimizer="none".'
            )
        # Tuples are comparable and hashable.
        if isinstance(shares, Mapping):
            shares = {axis: tuple(counts) for axis, counts in shares.items()}
        return Target(
            options=options,
            cluster=cluster,
            settings=Settings(
                memory_limit=options.memory_bytes,
                optimizer=optimizer,
                method=search.method,
                time_limit=search.time_limit,
                recompute=options.recompute,
                offload=options.offload,
                offload_optimizer=options.offload_optimizer,
                host_memory=cluster.device.host_memory or None if options.host_bytes is None else options.host_bytes,
                effort=search.effort,
                work_limit=search.work_limit,
                gradient_steps=options.accumulate,
                holds_sums=options.accumulate > 1,
            ),
            hints=options.hints,
            inputs=options.inputs,
            outputs=options.outputs,
            data_axes=(),
            input_placements=dict(options.input_placements or {}),
            output_placements=options.output_placements,
            dynamic=options.dynamic,
            shares=shares,
        )

    def on_mesh(self, mesh: MeshShape, plan: ShardingPlan | None = None) -> Target:
        """Return the target with its data axes on a mesh, and the placements of local inputs of a given plan.

        Raises:
            MeshError: the mesh has no such axis, or no names identify the data axes among several.
            HintError: `input_placements` are not valid.
        """
        if self.inputs == self.outputs == "global":
            return self
        placements = self.input_placements
        if not placements and plan is not None and plan.options.get("inputs") == "local":
            placements = plan.input_placements
        if self.options.data_axes is not None:
            axes = check_data_axes(mesh, self.options.data_axes)
        else:
            asked = [INPUTS.per_axis(glob, value, mesh) for glob, value in placements.items()]
            known = {*axes_of_rows(mesh, asked), *(self.shares if isinstance(self.shares, Mapping) else ())}
            axes = tuple(name for name in mesh.names if name in known) or find_data_axes(mesh)
        return replace(self, input_placements=placements, data_axes=axes)

    @property
    def in_pipeline(self) -> Target:
        """The target without options that pipelines lack: stages offload nothing, and compute all outputs."""
        options = replace(self.options, unread_outputs=())
        return replace(self, options=options, settings=replace(self.settings, offload="none"))

    def row_placements(self, mesh: MeshShape) -> tuple[Placement, ...]:
        """Return the placements of a tensor whose rows, along dim 0, are split over the data axes."""
        return row_placements(mesh, self.data_axes)

    def input_pins(
        self, mesh: MeshShape, shapes: Shapes, *, may_be_one: bool = False
    ) -> dict[str, tuple[Placement, ...]]:
        """Return the placements of local inputs: by `input_placements`, else rows over the data axes, else whole.

        Args:
            mesh: the mesh axes.
            shapes: input path -> its shape, global or local.
            may_be_one: True for shapes of a rank's own inputs, whose batch may be a single row.

        Raises:
            HintError: a placement is not valid for an input of that name.
        """
        batch = names_with_batch(shapes, may_be_one=may_be_one)
        rows, whole = self.row_placements(mesh), row_placements(mesh, ())
        default = {name: rows if name in batch else whole for name in shapes}
        pins = INPUTS.resolve(self.input_placements, lambda glob: names_reached(glob, shapes), shapes, mesh)
        return default | {name: fill(row, default[name]) for name, row in pins.items()}
