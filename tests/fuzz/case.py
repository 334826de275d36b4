"""One random model with random options on a random mesh, beside one device."""

from __future__ import annotations

import copy
import math
import random
import signal
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Placement, Replicate, Shard

import autoshard
import autoshard.operators  # which captures and rules need
from autoshard.capture.joint import capture
from autoshard.errors import AutoshardError, BudgetError, RuleError
from autoshard.plans.sharding_plan import ShardingPlan
from autoshard.runtime.shards import distribute, local_of
from autoshard.specs.axes import MeshShape
from autoshard.specs.spec import Spec
from autoshard.tools.verify.float64 import default_float64
from tests.fuzz.changes import CHANGES, change
from tests.fuzz.model import Model, RandomModel, inputs_of, loss_of, tensors_of
from tests.precision import BFLOAT16, BFLOAT16_ROUNDING, CastModule
from tests.random_plans import random_plan
from tests.runtime.meshes import simulated_mesh
from tests.training import fast_links, held_by_ranks, relative_difference
from tests.workers import Workers

TOLERANCE = 1e-9
TOLERANCE_OF_CASTS = 1e-6
"""Where parameters are float32 and the compute is float64."""

TOLERANCE_OF_LOWERED = 0.1
"""Where the compute is bfloat16: what is farther off is undetermined or wrong, as what is not finite is."""

ROUNDING = 1e-15
ATTEMPTS = 5
SECONDS = 120
"""Of compute that a case may take."""

MESHES = ((1,), (2,), (2,), (3,), (4,), (5,), (2, 2), (2, 2), (1, 3), (4, 1))
PLANS = ("random", "random", "fast", "full")

Traced = dict[str, dict[str, list[Tensor]]]


@dataclass(frozen=True, slots=True)
class Case:
    """What a seed stands for.

    Attributes:
        seed: of all of it.
        drawn: the model.
        mesh: sizes of the axes.
        plan: "random" strategies, or planned with this effort.
        recompute: the option.
        forced, uneven: of a random plan (see `random_plan`).
        limited: whether the memory limit is the smallest that there is a plan for.
        hinted: whether a parameter is pinned.
        dynamic: whether the batch is; the second step has another.
        shares: of the batch (with `dynamic`) or of every dim, along the first axis.
        local: whether every rank passes its own rows.
        planned_outputs: whether outputs stay as they lie.
        casts: whether parameters are float32, and the compute is float64.
        lowered: whether parameters are float32, and the compute is bfloat16.
        change: what is done to a parameter between the steps (see `CHANGES`); empty for nothing.
    """

    seed: int
    drawn: RandomModel
    mesh: tuple[int, ...]
    plan: str = "random"
    recompute: str = "none"
    forced: float = 0.0
    uneven: float = 0.0
    limited: bool = False
    hinted: bool = False
    dynamic: bool = False
    shares: tuple[int, ...] = ()
    local: bool = False
    planned_outputs: bool = False
    casts: bool = False
    lowered: bool = False
    change: str = ""

    @classmethod
    def of(cls, seed: int) -> Case:
        draw = random.Random(seed)
        case = cls(seed, RandomModel.of(draw), draw.choice(MESHES), draw.choice(PLANS))
        if draw.random() < 0.4:
            case = replace(case, change=draw.choice(sorted(CHANGES)))
        case = replace(
            case, planned_outputs=draw.random() < 0.2, recompute=draw.choice(("none", "none", "auto", "full"))
        )
        case = replace(case, lowered=draw.random() < 0.1)
        if case.plan == "random":
            return replace(case, forced=draw.choice((0.0, 0.3, 0.7)), uneven=draw.choice((0.0, 0.0, 0.5)))
        shares = tuple(draw.randint(1, 3) for _ in range(case.mesh[0]))
        return replace(
            case,
            limited=draw.random() < 0.25,
            hinted=draw.random() < 0.3,
            dynamic=draw.random() < 0.25,
            shares=shares if draw.random() < 0.15 else (),
            local=draw.random() < 0.2,
            casts=not case.lowered and draw.random() < 0.15,
        ).possible

    @property
    def possible(self) -> Case:
        """Without what does not go together: shares with other outputs than whole ones, or with local rows; and without
        local rows that are not equally many: ranks in one process can't hold these."""
        local = self.local and not self.shares and not any(batch % self.mesh[0] for batch in self.batches)
        return replace(self, local=local, planned_outputs=self.planned_outputs and not self.shares)

    @property
    def axes(self) -> dict[str, int]:
        return {f"axis{place}": size for place, size in enumerate(self.mesh)}

    @property
    def policy(self) -> MixedPrecisionPolicy | None:
        """What the compute is done in, if that is not what parameters are in."""
        return BFLOAT16 if self.lowered else MixedPrecisionPolicy(torch.float64, torch.float64) if self.casts else None

    @property
    def width(self) -> AbstractContextManager[object]:
        """While active, tensors are made in the precision of the step."""
        return nullcontext() if self.lowered else default_float64()

    @property
    def batches(self) -> list[int]:
        """Samples of each step."""
        return [self.drawn.batch, self.drawn.batch + self.dynamic]

    def __str__(self) -> str:
        options = {name: value for name, value in asdict(self).items() if value and name not in ("seed", "drawn")}
        said = ", ".join(f"{name}={value}" for name, value in options.items())
        blocks = " ".join(f"{name}/{join}" for name, join in self.drawn.blocks)
        sizes = f"batch {self.drawn.batch}, width {self.drawn.width}, {'tokens' if self.drawn.tokens else 'vectors'}"
        return f"seed {self.seed}: {blocks} -> {self.drawn.head} ({sizes}); {said}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        kind: "right"; "refused" by an error of autoshard's; "wrong"; "undetermined" where one device too gives other
            numbers after a rounding; "crash"; "slow"; or "no model" where one device fails, or computes what is not
            finite.
        said: the error, or how far which kind of tensor is from one device's.
        seconds: what it took.
    """

    case: Case
    kind: str
    said: str
    seconds: float


def run_seed(seed: int) -> Outcome:
    """What becomes of the case that a seed stands for."""
    return run(Case.of(seed))


def run(case: Case) -> Outcome:
    """Train a model on one device and on a mesh, and compare."""
    start = time.perf_counter()

    def outcome(kind: str, said: str = "") -> Outcome:
        return Outcome(case, kind, said, time.perf_counter() - start)

    try:
        with _time_limit(SECONDS), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                module, expected = on_one_device(case)
            except Exception as error:
                return outcome("no model", repr(error)[:300])
            if not all(bool(value[0].isfinite().all()) for kind in expected.values() for value in kind.values()):
                return outcome("no model", "what one device computes is not finite")
            found = _mesh(case, module)
    except RuleError:  # the rules are autoshard's own here
        return outcome("crash", traceback.format_exc()[-3000:])
    except AutoshardError as error:
        return outcome("refused", f"{type(error).__name__}: {error}")
    except TimeoutError:
        return outcome("slow", traceback.format_exc()[-1500:])
    except Exception:
        return outcome("crash", traceback.format_exc()[-3000:])
    errors = {kind: relative_difference(found[kind], expected[kind]) for kind in expected}
    limit = TOLERANCE_OF_CASTS if case.casts else TOLERANCE_OF_LOWERED if case.lowered else TOLERANCE
    wrong = {kind: error for kind, error in errors.items() if not error <= limit}
    if not wrong:
        return outcome("right", f"{max(errors.values()):.1e}")
    if _is_undetermined(case, expected, limit):
        return outcome("undetermined", str(wrong))
    again = _mesh(case, on_one_device(case)[0])
    repeated = {kind: relative_difference(again[kind], expected[kind]) for kind in wrong}
    return outcome("wrong", f"{wrong}; once more: {repeated}")  # a fault that comes and goes is looked for otherwise


def _is_undetermined(case: Case, expected: Traced, limit: float) -> bool:
    """Whether one device gives other numbers too if its parameters change by a rounding: equal scores, say, where only
    rounding says which is larger."""
    for attempt in range(ATTEMPTS):
        module, batches = _build(case), _batches(case)
        rounding = BFLOAT16_ROUNDING if case.lowered else ROUNDING
        with case.width, torch.no_grad():
            generator = torch.Generator().manual_seed(attempt)
            for parameter in module.parameters():
                parameter *= 1 + rounding * torch.randn(parameter.shape, generator=generator)
        found = _train_on_one_device(case, module, batches)
        if any(not relative_difference(found[kind], expected[kind]) <= limit for kind in expected):
            return True
    return False


@contextmanager
def _time_limit(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"{seconds} s")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)  # of this process, however many others there are
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _build(case: Case) -> nn.Module:
    torch.manual_seed(case.seed)
    with case.width:
        return Model(case.drawn)


def _batches(case: Case) -> list[dict[str, Tensor]]:
    with case.width:
        return [inputs_of(case.drawn, batch, case.seed + step) for step, batch in enumerate(case.batches)]


def on_one_device(case: Case) -> tuple[nn.Module, Traced]:
    """The model as it was built, and what it computes."""
    module = _build(case)
    if case.casts:
        module.float()
    return copy.deepcopy(module), _train_on_one_device(case, module, _batches(case))


def _train_on_one_device(case: Case, module: nn.Module, batches: list[dict[str, Tensor]]) -> Traced:
    """What training leaves behind on one device."""
    with case.width:
        if not (case.lowered or case.casts):
            return _train(case, module.double(), batches)
        found = _train(case, CastModule(module, torch.bfloat16 if case.lowered else torch.float64), batches)
    return {
        kind: {name.removeprefix("inner."): value for name, value in tensors.items()} for kind, tensors in found.items()
    }


def _mesh(case: Case, module: nn.Module) -> Traced:
    """What all ranks of a mesh compute."""
    batches = _batches(case)
    if case.plan == "random":
        with case.width:
            graph = capture(module, (), batches[0], mp_policy=case.policy)
        mesh, chance = MeshShape.of(case.axes), {"none": 0.0, "auto": 0.5, "full": 1.0}[case.recompute]
        options: dict[str, Any] = {
            "plan": random_plan(
                graph,
                mesh,
                case.seed,
                forced=case.forced,
                uneven=case.uneven,
                recompute=chance,
                planned_outputs=case.planned_outputs,
            ),
            "mp_policy": case.policy,
        }
    else:
        options = _options(case, module)
    if case.planned_outputs:
        options["output_placements"] = "planned"
    with case.width:
        if case.limited:
            options["memory_limit"] = _smallest(module, case.axes, batches[0], options)
        if case.plan != "random":  # outside of the ranks: what stands for devices there has no groups of its own
            text = autoshard.plan(module, case.axes, (), batches[0], **options).to_json()
            options["plan"] = ShardingPlan.from_json(text)
    if case.shares:
        return _processes(case, options)
    with simulated_mesh(**case.axes) as mesh:
        return _steps(case, module, mesh, batches, options)


def _processes(case: Case, options: dict[str, Any]) -> Traced:
    """The same in processes: in one process, ranks can't hold sizes of their own."""
    with Workers(math.prod(case.mesh), SECONDS) as workers:
        ranks: list[Traced | AutoshardError] = workers.run(_on_rank, case, options)
    traces = [rank for rank in ranks if not isinstance(rank, AutoshardError)]
    if len(traces) < len(ranks):
        raise next(rank for rank in ranks if isinstance(rank, AutoshardError))
    return {
        kind: {name: [rank[kind][name][0] for rank in traces] for name in tensors}
        for kind, tensors in traces[0].items()
    }


def _on_rank(case: Case, options: dict[str, Any]) -> Traced | AutoshardError:
    mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=tuple(case.axes))
    module = _build(case)
    try:
        return _steps(case, module.float() if case.casts else module, mesh, _batches(case), options)
    except AutoshardError as error:
        return error


def _steps(
    case: Case, module: nn.Module, mesh: DeviceMesh, batches: list[dict[str, Tensor]], options: dict[str, Any]
) -> Traced:
    with case.width:
        autoshard.parallelize(module, mesh, (), batches[0], **options)
        if case.local:
            spec = Spec.of(Shard(0), *[Replicate()] * (len(case.mesh) - 1))
            batches = [
                {name: local_of(distribute(value, mesh, spec)) for name, value in batch.items()} for batch in batches
            ]
        return _train(case, module, batches)


def _options(case: Case, module: nn.Module) -> dict[str, Any]:
    draw = random.Random(case.seed + 1)
    options: dict[str, Any] = {
        "cluster": fast_links(),
        "effort": case.plan,
        "recompute": case.recompute,
        "time_limit": 20.0,
        "work_limit": 500,
    }
    if case.hinted:
        name, parameter = draw.choice(list(module.named_parameters()))
        options["hints"] = {name: tuple(_placement(parameter, draw) for _ in case.mesh)}
    if case.dynamic:
        options["dynamic"] = {name: {0: "batch"} for name in ("x", "target")}
    if case.shares:
        options["shares"] = {"axis0": case.shares}
    if case.local:
        placements = (Shard(0), *[Replicate()] * (len(case.mesh) - 1))
        options |= {"inputs": "local", "input_placements": dict.fromkeys(("x", "target"), placements)}
    options["mp_policy"] = case.policy
    return options


def _placement(parameter: Tensor, draw: random.Random) -> Placement:
    return draw.choice([Replicate(), *(Shard(dim) for dim in range(parameter.ndim))])


def _smallest(
    module: nn.Module, mesh: dict[str, int], inputs: dict[str, Tensor], options: dict[str, Any]
) -> int | None:
    try:
        autoshard.plan(module, mesh, (), inputs, memory_limit=1, **options)
    except BudgetError as error:
        return error.peak
    return None


def _train(case: Case, module: nn.Module, batches: list[dict[str, Tensor]]) -> Traced:
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    losses, outputs = {}, {}
    for step, batch in enumerate(batches):
        tensors = tensors_of(module(**batch))
        outputs = {name: held_by_ranks(value.detach()) for name, value in tensors.items()}
        loss = loss_of(tensors)
        optimizer.zero_grad()
        loss.backward()
        if case.change and step == 0:
            change(module, case.change, case.seed)
        optimizer.step()
        losses[f"step {step}"] = held_by_ranks(loss.detach())
    held = {
        "gradients": {name: one.grad for name, one in module.named_parameters() if one.grad is not None},
        "parameters": dict(module.named_parameters()),
        "buffers": dict(module.named_buffers()),
    }
    return {"losses": losses, "outputs": outputs} | {
        kind: {name: held_by_ranks(value.detach()) for name, value in tensors.items()} for kind, tensors in held.items()
    }
