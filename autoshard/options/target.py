"""The target of a plan: a user's options for one graph on the devices that there are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from autoshard.capture.dynamic import Dynamic
from autoshard.cluster.cluster import Cluster, default_cluster
from autoshard.memory.optimizer import OptimizerMemory, optimizer_memory
from autoshard.options.options import Hints, Options, Placements, Shares
from autoshard.reshard.reductions import DeferredReduction


@dataclass(frozen=True, slots=True)
class Settings:
    """Limits of a plan, and how to search for it.

    Attributes:
        memory_limit: bytes per device that the step's peak may reach; None for no limit.
        optimizer: the memory of the optimizer.
        method: one of `autoshard.options.METHODS`; "force" is "auto" without a limit, and keeps a limit only by forcing
            the largest parameters to be sharded (Rhino 4.4).
        time_limit: seconds for the whole search.
        recompute: the layers that the backward half may run again, one of `autoshard.options.RECOMPUTE`.
        effort: one of `autoshard.options.EFFORTS`; "fast" takes the first result of messages or segments on tied
            layers.
        work_limit: the solver's work limit for every problem, in its units of work, under which equal runs give equal
            plans, however busy the machine is; None for no limit.
        gradient_steps: runs of the step, such as microbatches of a pipeline, whose gradients are added up before they
            are reduced; a reduction counts so much less.
        under_way: runs of the step, such as microbatches of a pipeline, that are under way at once, each of which holds
            its saved tensors.
        reduced: the gradients that are reduced once for several runs; others are reduced with every run, and count in
            full.
        holds_sums: True if the sums of the runs before are held in a run, and are no part of another account.
    """

    memory_limit: int | None = None
    optimizer: OptimizerMemory = field(default_factory=lambda: optimizer_memory(None, None, foreach=False))
    method: str = "auto"
    time_limit: float = 30.0
    recompute: str = "auto"
    effort: str = "full"
    work_limit: int | None = None
    gradient_steps: int = 1
    under_way: int = 1
    reduced: DeferredReduction = "step"
    holds_sums: bool = False

    @property
    def left_unreduced(self) -> DeferredReduction | None:
        """The gradients that a run of the step leaves unreduced; None if it reduces all."""
        return self.reduced if self.gradient_steps > 1 else None

    @property
    def runs_per_reduction(self) -> int:
        """Runs of the step for each reduction of a gradient, as the search counts them."""
        # Gradients of one stage may be reduced with every microbatch, which then count in full.
        return self.gradient_steps if self.reduced == "step" else 1


@dataclass(frozen=True, slots=True)
class Target:
    """The target of the plan of one graph.

    The targets of a stage of a pipeline, and of devices with shares, differ from the user's options, which stay as they
    are.

    Attributes:
        options: as the user gave them.
        cluster: the devices, with the compiler's prices where local programs are compiled.
        settings: limits, and how to search.
        hints, inputs, input_placements, output_placements, dynamic, shares: as in `Options`.
    """

    options: Options
    cluster: Cluster
    settings: Settings
    hints: Hints | None
    inputs: Literal["global", "local"]
    input_placements: Mapping[str, Any]
    output_placements: Placements
    dynamic: Dynamic | None
    shares: Shares | Literal["auto"] | None

    @staticmethod
    def of(options: Options, device_type: str | None) -> Target:
        """Return the target of a whole model on devices of a type; None if there are no devices yet.

        Raises:
            ClusterError: there is no such cluster.
            PlanError: the optimizer is unknown.
        """
        cluster = default_cluster(device_type) if options.cluster is None else Cluster.of(options.cluster)
        # A compiler fuses kernels, which changes their prices.
        if options.compile:
            cluster = cluster.with_compiler
        # torch's optimizers update all parameters with one call per operator on accelerators, one by one on CPUs.
        foreach = cluster.name != "cpu" if device_type is None else device_type != "cpu"
        search, shares = options.search, options.shares
        assert search.time_limit is not None, "options come from a function that has a time limit"
        # Tuples compare, and can be keys.
        if isinstance(shares, Mapping):
            shares = {axis: tuple(counts) for axis, counts in shares.items()}
        return Target(
            options=options,
            cluster=cluster,
            settings=Settings(
                memory_limit=options.memory_bytes,
                optimizer=optimizer_memory(options.optimizer, options.optimizer_bytes_per_element, foreach),
                method=search.method,
                time_limit=search.time_limit,
                recompute=options.recompute,
                effort=search.effort,
                work_limit=search.work_limit,
                gradient_steps=options.accumulate,
                holds_sums=options.accumulate > 1,
            ),
            hints=options.hints,
            inputs=options.inputs,  # type: ignore[arg-type]
            input_placements=dict(options.input_placements or {}),
            output_placements=options.output_placements,
            dynamic=options.dynamic,
            shares=shares,
        )
