"""The options of `plan`, `parallelize`, `frontier` and `search`: a frozen object that checks its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypedDict, get_args

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from autoshard.capture.dynamic import Dynamic
from autoshard.cluster.cluster import Cluster
from autoshard.errors import InputError, PlanError, warn_caller
from autoshard.names import suggestion
from autoshard.units import parse_bytes

Hints = Mapping[str, Any]
Placements = Mapping[str, Any] | Literal["planned", "auto"] | None
"""Globs over names of outputs -> placements, as `autoshard.options.placements` reads them."""
Shares = Mapping[str, Sequence[int]]
"""Name of one mesh axis -> the shares of its ranks, as proportions."""
OptimizerOption = str | type[torch.optim.Optimizer] | torch.optim.Optimizer | None

Recompute = Literal["auto", "none", "full", "selective"]
Offload = Literal["none", "auto"]
OffloadOptimizer = Literal["none", "all", "auto"]
Boundary = Literal["global", "local"]
"""The tensors that a rank passes or gets: those of the whole batch, or its own rows."""
Method = Literal["auto", "eliminate", "alternate", "ilp", "force"]
Effort = Literal["fast", "full"]
SearchOption = Literal["mini-time", "mini-parallelism", "profiling"]

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
ALWAYS_RECOMPUTE = frozenset[Recompute](("full", "selective"))
"""The values for which recomputation does not depend on the memory limit."""
OFFLOAD: tuple[Offload, ...] = get_args(Offload)
OFFLOAD_OPTIMIZER: tuple[OffloadOptimizer, ...] = get_args(OffloadOptimizer)
METHODS: tuple[Method, ...] = get_args(Method)
EFFORTS: tuple[Effort, ...] = get_args(Effort)
SCHEDULES = (
    *("auto", "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV", "custom"),
)
SEARCH_OPTIONS: tuple[SearchOption, ...] = get_args(SearchOption)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Options of the search for a plan.

    Attributes:
        method: `"auto"`, `"eliminate"`, `"alternate"` or `"ilp"`; or `"force"`, which meets a memory limit only by
            sharding the largest parameters (and recomputation): a quicker search that finds slower plans, or none.
        time_limit: seconds that the search may take, without capture. None means 120 s for a plan or a search of
            meshes, and 240 s for a frontier. If it ended the search of a plan, `method` says so.
        effort: `"full"`, or `"fast"`: repeated layers always get equal plans, one problem is solved instead of several,
            a large one only by messages and segments (Rhino's O2), and the bound may be looser.
        work_limit: the solver's work limit for every problem, in its units of work. Unlike with `time_limit`, equal
            calls give equal plans, however busy the machine is. None: no limit.
        verbose: log the progress of the search (logger `autoshard`, level INFO). Otherwise a line on standard error
            shows it if that is a terminal.

    Raises:
        PlanError: a value is not valid.
    """

    method: Method = "auto"
    time_limit: float | None = None
    effort: Effort = "full"
    work_limit: int | None = None
    verbose: bool = False

    def __post_init__(self) -> None:
        _check_choice("method", self.method, METHODS)
        _check_choice("effort", self.effort, EFFORTS)
        # `not >` is also true for NaN.
        if self.time_limit is not None and not self.time_limit > 0:
            raise PlanError(f"time_limit={self.time_limit!r}: it must be above zero seconds.")
        if self.work_limit is not None and not self.work_limit > 0:
            raise PlanError(f"work_limit={self.work_limit!r}: it must be above zero, or None for no limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Options of a pipeline.

    Attributes:
        axis: name of the mesh axis along which stages are placed; by default `"pp"`, if that axis exists. Each position
            on it is a pipeline rank, unless task graphs in `forward` ask for devices that add up to it (docs/hints.md).
        schedule: `"auto"`, the one with the shortest predicted step of all that fit; or a name, such as `"1F1B"`
            (`autoshard.options.SCHEDULES`), or `"custom"` for an order that autoshard searches.
        microbatches: microbatches of a step: `"auto"`, or a number that divides the batch.
        virtual: stages per rank: `"auto"`, or a number.
        batch_dims: name of an input (such as `mask` or `batch['x']`) -> the dim of samples that is split into
            microbatches; None if every microbatch gets the whole tensor. For other inputs it is dim 0.

    Raises:
        PlanError: a number is not valid.
    """

    axis: str | None = None
    schedule: str = "auto"
    microbatches: int | Literal["auto"] = "auto"
    virtual: int | Literal["auto"] = "auto"
    batch_dims: Mapping[str, int | None] | None = None

    def __post_init__(self) -> None:
        for name, number in (("microbatches", self.microbatches), ("virtual", self.virtual)):
            # A bool is an int in Python.
            if number != "auto" and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
                raise PlanError(f'{name}={number!r}: choose "auto", or a whole number from 1 up.')

    @property
    def requests(self) -> dict[str, Any]:
        """The options that differ from their defaults, without the axis."""
        return {
            item.name: getattr(self, item.name)
            for item in fields(self)
            if item.name != "axis" and getattr(self, item.name) != item.default
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a plan. Each field is also a keyword of `plan`, `parallelize`, `frontier` and `search`.

    Attributes:
        hints: globs of parameter or module paths -> placements that the planner must keep; or, for module paths,
            `autoshard.replicate(n)`, `autoshard.split(n)`, `autoshard.recompute()`, `autoshard.keep()` or
            `autoshard.offload()`. See docs/hints.md.
        memory_limit: bytes per device (or `"24GiB"`) that the step's peak may reach. Not for `frontier`.
        optimizer: the optimizer that will train the model: an optimizer, its class, or a name such as `"adamw"` (the
            default), `"sgd"`, `"momentum"` or `"adafactor"` (`autoshard.Adafactor`: torch's accepts only whole
            parameters). Memory includes its state and its temporary tensors.
        optimizer_bytes_per_element: for any other optimizer, the bytes of its state per element of a trained parameter.
        cluster: a preset's name, a path of a cluster file, or a `Cluster`; by default `"cpu"` for a CPU mesh, for a
            CUDA mesh the preset of the present GPU, or the nearest one scaled to it, and `"h100"` otherwise.
        mp_policy: precisions, as `fully_shard(module, mp_policy=...)` understands them: parameters stay in their own
            dtype, and are cast to `param_dtype` before they are gathered; the inputs of `forward` are cast too
            (`cast_forward_inputs`), its outputs to `output_dtype`; gradients are reduced in `reduce_dtype`, or the
            dtype of the compute, and then cast back.
        recompute: the part of the forward pass that the backward pass recomputes instead of keeping its results.
            `"auto"`: single operators of layers, chosen together with the placements to meet the memory limit, and none
            without a limit. `"none"`: nothing. With or without a limit: `"full"`: every layer, so that only inputs and
            outputs of layers are kept; `"selective"`: the cheap operators of every layer, all but matrix products,
            convolutions, attention and recurrence. In addition, what hints and `autoshard.recompute()` or
            `torch.utils.checkpoint` in the model's code name is recomputed, and what `autoshard.keep()` names is not.
            The default for a frontier is `"none"`. Recomputation repeats the same random numbers; its collectives are
            included in the price.
        offload: the tensors that are moved to the host between the halves of the step. `"none"`: those that hints and
            `autoshard.offload()` in the model's code name. `"auto"`: in addition, under a memory limit, those for which
            this is faster than other ways to meet the limit. Copies overlap with compute, unless the program is
            compiled. Not for pipelines, whose stages keep their tensors: a search of meshes plans them without.
        offload_optimizer: the parameters whose optimizer state is kept and updated on the host (ZeRO-Offload).
            `"none"`: none. `"all"`: all trained ones. `"auto"`: under a memory limit, those for which the step, updates
            on the host included, is faster than with other ways to meet the limit. Elementwise optimizers of torch,
            created as usual, then keep their state there. Not for pipelines.
        host_memory: bytes of host memory that one device may use (or `"100GiB"`); by default that of the cluster, or
            unlimited if the cluster has no number.
        dynamic: sizes that may differ between calls: for inputs by name, `{dim: name}`, such as `{"input_ids": {0:
            "batch", 1: "seq"}, "labels": {0: "batch", 1: "seq"}}`; dims with the same name have the same size. Instead
            of a name, a `torch.export.Dim` may limit the size, or make it a multiple (`8 * Dim("batch")`). Costs are
            those of the example's sizes. One plan serves all sizes; sizes that an axis does not divide are padded, so
            at most one axis splits such a dim.
        shares: for devices of different speed, the shares of the ranks of one mesh axis, as proportions, such as
            `{"dp": (4, 2)}`. With `dynamic` they apply to the batch, the dynamic size of dim 0 of the inputs. Every
            rank runs operators on its own rows, without padding; means, losses and gradients are those of the global
            batch. Global inputs are split in these proportions; local ones are taken as passed, at least one row per
            rank. On this axis, tensors that depend on the batch are split along it or not at all. Without `dynamic`
            they apply to every dim that a plan with equal parts splits along the axis, if the number of parts divides
            it (`(5, 3)` are 8 parts): samples, heads, columns, classes. Parameters with such dims are whole on this
            axis, and every rank computes with its part of them; a hint that one is sharded there names the dim to
            split. The predicted step is that of the slowest rank; memory is that of equal shares. `"auto"`: if the
            cluster has several kinds of devices along an axis, and inputs are global, shares in proportion to speed, as
            far as memory allows, if they make the step shorter (`plan.shares` has them); otherwise equal ones. None:
            equal ones. In a pipeline they apply to every microbatch, on an axis other than the pipeline's, and need no
            `dynamic`; memory is that of the device with the least room for its share.
        inputs: `"global"`: every rank passes whole tensors; `"local"`: its own rows, as a data loader yields them. The
            ranks compare the sizes of every call and raise one error. Numbers of rows may differ between ranks if they
            are those of the blocks of `Shard` for one batch, the last ones shorter or empty; other sizes are captured
            once. A rank with fewer calls is not detected: the others wait for it until torch's timeout.
        outputs: `"global"`: outputs are whole; `"local"`: outputs with the batch are this rank's rows, as plain
            tensors, and others are whole. The gradients of such rows are those of the mean of the ranks' losses over
            the data axes, as in `DistributedDataParallel`. If `forward` returns a loss, gradients are those of this
            loss.
        data_axes: for local inputs and outputs, the names of the mesh axes along which ranks have different rows. Ranks
            along other axes pass the same rows, which the first call of every kind compares. By default they are the
            axes over which `input_placements` or the given plan split rows, or those with names such as `"dp"`,
            `"fsdp"` or `"data"`, or the only axis.
        example_inputs: the tensors of the example call: `"global"`, the whole batch; or `"local"`, with local inputs,
            the rows of one rank.
        input_placements: for local inputs, globs over their names -> placements, such as `{"mask": Replicate()}` or
            `{"x": {"tp": Shard(1)}}`; see docs/hints.md. By default, and on axes left open, the first dim of inputs
            with the batch's size is split over the data axes, and everything else is whole.
        output_placements: None: as `outputs` says; `"planned"`: DTensors with the planned placements; `"auto"`: outputs
            beside a loss (a differentiated scalar) keep their placements, as DTensors where they are sharded, and all
            outputs are whole without a loss, or in a pipeline; or globs over names of outputs -> placements, with which
            these are returned as DTensors, or as local tensors with `outputs="local"`. Axes left open are whole, with
            `outputs="local"` rows on the data axes.
        unread_outputs: names of outputs that training does not read, or globs over them, such as `("logits",)`. A call
            with gradients enabled that returns a loss, a floating-point scalar with a gradient, returns None instead of
            them, and its program does not compute them: a loss with large, unread logits may be computed in pieces
            (docs/memory.md). Every other call, such as one under `torch.no_grad()`, returns all of its outputs. Later
            calls may lack outputs of the first training call. Not for pipelines.
        accumulate: backwards per step of the optimizer, all but the last of which run in `autoshard.no_sync`. The
            predicted step is one run, with its part of the reductions; memory includes the sums of earlier runs, most
            of which have the size of gradients before their reduction. Plans with more runs shard less over axes that
            split the batch. Not for pipelines, which sum over microbatches, nor for `frontier` and `search`.
        compile: compile the local forward and backward programs by inductor. The plan prices operators that the
            compiler fuses as one kernel, and counts no memory for tensors read only inside such kernels.
        search: how to search, see `Search`.
        pipeline: schedule and microbatches of a pipeline, see `Pipeline`. The example of a pipeline is a whole batch;
            `dynamic`, local inputs and outputs, and `output_placements` are refused.

    Raises:
        PlanError, InputError, BudgetError: a value is not valid; the message names it.
    """

    hints: Hints | None = None
    memory_limit: int | str | None = None
    optimizer: OptimizerOption = None
    optimizer_bytes_per_element: float | None = None
    cluster: str | Cluster | None = None
    mp_policy: MixedPrecisionPolicy | None = None
    recompute: Recompute = "auto"
    offload: Offload = "none"
    offload_optimizer: OffloadOptimizer = "none"
    host_memory: int | str | None = None
    dynamic: Dynamic | None = None
    shares: Shares | Literal["auto"] | None = "auto"
    inputs: Boundary = "global"
    outputs: Boundary = "global"
    data_axes: Sequence[str] | None = None
    example_inputs: Boundary = "global"
    input_placements: Mapping[str, Any] | None = None
    output_placements: Placements = None
    unread_outputs: Sequence[str] = ()
    accumulate: int = 1
    compile: bool = False
    search: Search = field(default_factory=Search)
    pipeline: Pipeline = field(default_factory=Pipeline)

    def __post_init__(self) -> None:
        _check_choice("recompute", self.recompute, RECOMPUTE)
        _check_choice("offload", self.offload, OFFLOAD)
        _check_choice("offload_optimizer", self.offload_optimizer, OFFLOAD_OPTIMIZER)
        _check_boundary(self)
        # Passing a dict instead of an object is a likely mistake, and would fail late, in the planner.
        for name, group in (("search", Search), ("pipeline", Pipeline)):
            if not isinstance(getattr(self, name), group):
                raise PlanError(
                    f"{name}={getattr(self, name)!r}: pass an autoshard.{group.__name__}, such as "
                    f"autoshard.{group.__name__}({', '.join(f'{item.name}=...' for item in fields(group)[:2])})."
                )
        if isinstance(self.accumulate, bool) or not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise PlanError(
                f"accumulate={self.accumulate!r}: it is the number of backwards for every step of the optimizer, a "
                "whole number from 1 up."
            )
        # Parsed to raise errors: a wrong unit is reported before the module is captured.
        for size in (self.memory_limit, self.host_memory):
            if size is not None:
                parse_bytes(size)
        _check_policy(self.mp_policy)
        _check_shares(self)

    @property
    def memory_bytes(self) -> int | None:
        """The memory limit in bytes; None for no limit."""
        return None if self.memory_limit is None else parse_bytes(self.memory_limit)

    @property
    def host_bytes(self) -> int | None:
        """The bytes of host memory that one device may use; None if not given."""
        return None if self.host_memory is None else parse_bytes(self.host_memory)


class MeshKeywords(TypedDict, total=False):
    """Keywords of `plan` and `parallelize` on a mesh without a pipeline: the fields of `Options` but `pipeline`."""

    hints: Hints | None
    memory_limit: int | str | None
    optimizer: OptimizerOption
    optimizer_bytes_per_element: float | None
    cluster: str | Cluster | None
    mp_policy: MixedPrecisionPolicy | None
    recompute: Recompute
    offload: Offload
    offload_optimizer: OffloadOptimizer
    host_memory: int | str | None
    dynamic: Dynamic | None
    shares: Shares | Literal["auto"] | None
    inputs: Boundary
    outputs: Boundary
    data_axes: Sequence[str] | None
    example_inputs: Boundary
    input_placements: Mapping[str, Any] | None
    output_placements: Placements
    unread_outputs: Sequence[str]
    accumulate: int
    compile: bool
    search: Search


class OptionKeywords(MeshKeywords, total=False):
    """Keywords of `plan`, `parallelize`, `frontier` and `search`: the fields of `Options`, and the earlier spellings of
    the fields of `Search` and `Pipeline`, which warn.
    """

    pipeline: Pipeline
    # Earlier spellings.
    method: Method
    time_limit: float
    effort: Effort
    work_limit: int | None
    verbose: bool
    pipeline_axis: str | None
    schedule: str
    microbatches: int | str
    virtual: int | str
    batch_dims: Mapping[str, int | None] | None


_GROUPED = {
    **{name: ("search", name) for name in ("method", "time_limit", "effort", "work_limit", "verbose")},
    **{name: ("pipeline", name) for name in ("schedule", "microbatches", "virtual", "batch_dims")},
    "pipeline_axis": ("pipeline", "axis"),
}
"""Earlier keyword -> its group and its name there."""


@dataclass(frozen=True, slots=True)
class _EntryPoint:
    """A function that takes options.

    Attributes:
        time_limit: the default time limit of its search, in seconds.
        defaults: defaults that differ from those of `Options`.
        refused: options that it does not take.
    """

    time_limit: float = 120.0
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()


_ENTRY_POINTS = {
    "plan": _EntryPoint(),
    "parallelize": _EntryPoint(),
    # A frontier has plans for all memory limits.
    "frontier": _EntryPoint(
        240.0,
        {"recompute": "none", "shares": None},
        frozenset({"memory_limit", "offload_optimizer", "shares", "accumulate", "compile", "pipeline"}),
    ),
    "search": _EntryPoint(
        120.0,
        {"shares": None},
        frozenset(
            {
                *("inputs", "outputs", "data_axes", "example_inputs", "input_placements"),
                *("dynamic", "shares", "accumulate", "compile", "offload_optimizer"),
            }
        ),
    ),
    "why_not": _EntryPoint(),
    # No standard layout has shares or gathers outputs.
    "compare": _EntryPoint(
        defaults={"shares": None, "output_placements": "planned"},
        refused=frozenset({"inputs", "input_placements", "dynamic", "shares", "pipeline"}),
    ),
    # The programs run in float64, operator by operator, on equal ranks.
    "verify": _EntryPoint(
        defaults={"shares": None},
        refused=frozenset({"mp_policy", "shares", "accumulate", "compile", "pipeline", "example_inputs"}),
    ),
}


def collect_options(function: str, keywords: Mapping[str, Any]) -> Options:
    """Return the options for the keywords that a user passed to a function.

    Args:
        function: the function: `"plan"`, `"parallelize"`, `"frontier"`, `"search"`, `"compare"`, `"why_not"` or
            `"verify"`.
        keywords: as `OptionKeywords`.

    Raises:
        TypeError: the function takes no keyword of that name; the message names the close ones.
        PlanError, InputError, BudgetError: a value is not valid, or there is no such function.
    """
    if function not in _ENTRY_POINTS:
        raise InputError(f"autoshard.{function} takes no options of planning. {suggestion(function, _ENTRY_POINTS)}")
    # Functions take keywords as `**options`, so that Python does not check their names.
    rules = _ENTRY_POINTS[function]
    known = {item.name for item in fields(Options)} - rules.refused
    grouped: dict[str, dict[str, Any]] = {"search": {}, "pipeline": {}}
    values: dict[str, Any] = dict(rules.defaults)
    for name, value in keywords.items():
        # A function that refuses a group also refuses the earlier keywords of the group.
        group, new_name = _GROUPED.get(name, ("", name))
        if group in known:
            grouped[group][new_name] = value
        elif name in known:
            values[name] = value
        else:
            raise TypeError(f"autoshard.{function} takes no keyword {name!r}. {suggestion(name, sorted(known))}")
    for group, kind in (("search", Search), ("pipeline", Pipeline)):
        if grouped[group]:
            _warn_of_earlier_keywords(function, group, grouped[group])
            values[group] = replace(values.get(group, kind()), **grouped[group])
    options = Options(**values)
    # An explicit group without a limit, `Search(method="ilp")`, gets the function's limit, too.
    if options.search.time_limit is None:
        options = replace(options, search=replace(options.search, time_limit=rules.time_limit))
    return options


def _warn_of_earlier_keywords(function: str, group: str, values: Mapping[str, Any]) -> None:
    keywords = ", ".join(f"{name}={value!r}" for name, value in values.items())
    warn_caller(
        f"keywords of autoshard.{function} have moved: write {group}=autoshard.{group.title()}({keywords}). The next "
        "release takes no other spelling.",
        DeprecationWarning,
    )


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise PlanError(f"{name}={value!r} is unknown: choose one of {', '.join(choices)}.")


def _check_boundary(options: Options) -> None:
    """Raise a `PlanError` for invalid or contradictory options of inputs and outputs."""
    for name, meaning in (
        ("inputs", "every rank passes whole tensors"),
        ("outputs", "every rank is given whole tensors"),
        ("example_inputs", "the example is the whole batch"),
    ):
        value = getattr(options, name)
        if value not in ("global", "local"):
            raise PlanError(f'{name}={value!r}: choose "global" ({meaning}) or "local" (its rows).')
    unread = options.unread_outputs
    if isinstance(unread, str) or not isinstance(unread, Sequence) or not all(isinstance(glob, str) for glob in unread):
        raise PlanError(f'unread_outputs={unread!r}: pass the names of outputs in a tuple, such as ("logits",).')
    named = isinstance(options.output_placements, str)
    if named and options.output_placements not in ("planned", "auto"):
        raise PlanError(
            f'output_placements={options.output_placements!r}: pass "planned", "auto" or a mapping of output names.'
        )
    if named and options.outputs == "local":
        raise PlanError(
            f'outputs="local" and output_placements="{options.output_placements}": local tensors do not tell how they '
            "lie. Name the outputs that are not to be rows, and how they lie, or leave one of the two out."
        )
    if options.inputs == "global":
        if options.input_placements:
            raise PlanError(
                'input_placements is for inputs="local": global inputs are sliced by the program, for free.'
            )
        if options.example_inputs == "local":
            raise PlanError('example_inputs="local" is for inputs="local": calls are as large as the example.')
        if options.data_axes is not None and options.outputs == "global":
            raise PlanError(
                'data_axes is for inputs="local" and outputs="local": otherwise every rank passes the whole batch, and '
                "the plan decides which part it computes."
            )


def _check_shares(options: Options) -> None:
    shares = options.shares
    if shares is None or shares == "auto":
        return
    # Axis names and numbers of ranks are checked once the mesh is known.
    if not isinstance(shares, Mapping) or len(shares) != 1:
        raise PlanError(
            f'shares={shares!r}: name one mesh axis and what each of its ranks takes: {{"dp": (4, 2)}}; or say "auto", '
            "or None for equal shares."
        )
    ((axis, counts),) = shares.items()
    if not (isinstance(counts, Sequence) and all(isinstance(share, int) and share > 0 for share in counts)):
        raise PlanError(f"shares of axis {axis!r} are {counts!r}: every rank takes a whole number above zero.")
    for name, default in (("output_placements", None), ("outputs", "global")):
        if getattr(options, name) != default:
            raise PlanError(f"with shares, outputs come back whole: no DTensor lies in shares. Leave {name} out.")


def _check_policy(policy: object) -> None:
    if policy is None:
        return
    # torch's class does not check anything.
    if not isinstance(policy, MixedPrecisionPolicy):
        raise InputError(
            f"mp_policy is a torch.distributed.fsdp.MixedPrecisionPolicy, such as MixedPrecisionPolicy("
            f"param_dtype=torch.bfloat16, reduce_dtype=torch.float32), got {type(policy).__name__}."
        )
    for name in ("param_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise InputError(f"mp_policy.{name} is {dtype!r}: it must be a floating dtype, such as torch.bfloat16.")
