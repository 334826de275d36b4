"""One training step of a small GPT, measured: seconds, memory, communication behind compute, synchronisations."""

from __future__ import annotations

import functools
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

import autoshard
from autoshard.tools.selfcheck import models
from autoshard.tools.selfcheck.models import Inputs, make_seeded
from autoshard.tools.selfcheck.outcome import CheckOutcome, Processes
from autoshard.tools.selfcheck.self_checks import SelfCheck, copy_model_to
from autoshard.units import format_bytes, format_seconds

# Measured over predicted seconds above which a step is slow; a guess that works.
SLOW = 1.5
# Measured over predicted bytes, without workspaces, above which a peak is large; a guess that works.
LARGE = 1.1
# Bytes of the libraries for matrix products, which plans do not count.
WORKSPACES = 128 * 2**20
_STEPS, _WARM = 5, 3
_CALIBRATE = "Measure: torchrun --nproc-per-node N -m autoshard calibrate my.json; then plan by cluster='my.json'."
# In the warning at a line that waited. The mode itself warns, too: that it is a prototype.
_WAITED = "called a synchronizing"
_NO_STEP = "there is no step to profile: see the step's line"


@dataclass(frozen=True, slots=True)
class ProfiledStep:
    """A parallelized model, its inputs and its optimizer."""

    module: nn.Module
    inputs: Inputs
    optimizer: torch.optim.Optimizer
    plan: autoshard.ShardingPlan

    def train(self) -> None:
        """Run forward and backward without the optimizer, whose seconds the plan predicts."""
        self.optimizer.zero_grad()
        self.module(**self.inputs).backward()


class StepProfile:
    """The checks of one profile; the first makes the step that the others measure.

    Args:
        cluster: for which the step is planned, as `autoshard.parallelize` takes it.
    """

    def __init__(self, cluster: str | None = None) -> None:
        self._cluster = cluster
        self._step: ProfiledStep | None = None
        # Bytes allocated before there was a model.
        self._before = 0
        self._seconds = 0.0

    def checks(self) -> tuple[SelfCheck, ...]:
        """Return the checks, in order."""
        return (
            SelfCheck("step, seconds", self.seconds),
            SelfCheck("step, peak memory", self._on_cuda(self.memory, "a CPU counts no allocations (planned {peak})")),
            # Before the profile, behind which kernels are queued more slowly.
            SelfCheck("step, host time", self._on_cuda(self.host, "on a CPU the host computes the step itself")),
            SelfCheck(
                "step, communication hidden",
                self._on_cuda(self.hidden_share, "not measured on a CPU: gloo's threads leave no trace of a device"),
            ),
            SelfCheck("step, synchronisations", self._on_cuda(self.synchronisations, "a CPU has nobody to wait for")),
        )

    def _on_cuda(
        self, measure: Callable[[ProfiledStep], CheckOutcome], on_cpu: str
    ) -> Callable[[Processes], CheckOutcome]:
        """Return the check of a measurement on GPUs; `on_cpu` is the reason to skip it elsewhere."""

        def check(processes: Processes) -> CheckOutcome:
            if self._step is None:
                return CheckOutcome("skipped", _NO_STEP)
            if processes.device.type != "cuda":
                return CheckOutcome("skipped", on_cpu.format(peak=format_bytes(self._step.plan.memory.peak)))
            return measure(self._step)

        return check

    def seconds(self, processes: Processes) -> CheckOutcome:
        """Compare the measured seconds of a step with the predicted ones."""
        # A blocking host would wait for every collective, and nothing would overlap.
        processes.start(blocking=False)
        self._step = step = self._make_step(processes)
        # The first steps make communicators and choose kernels.
        for _ in range(_WARM):
            step.train()
        # The median: one step that is disturbed from outside should not count.
        self._seconds = statistics.median(_time_run(step.train, processes) for _ in range(_STEPS))
        predicted = step.plan.step_seconds
        ratio = self._seconds / predicted
        figure = (
            f"{format_seconds(self._seconds)}, predicted {format_seconds(predicted)} ({ratio:.2f} x, "
            f"by the cluster {step.plan.cluster})"
        )
        values = {"measured": self._seconds, "predicted": predicted}
        # The preset is not of this machine.
        if self._cluster is None and processes.device.type == "cpu":
            return CheckOutcome("ok", figure, _CALIBRATE, values, ratio)
        slow = ratio > SLOW
        return CheckOutcome("slow" if slow else "ok", figure, _CALIBRATE if slow else "", values, ratio)

    def memory(self, step: ProfiledStep) -> CheckOutcome:
        """Compare the bytes allocated at the peak of a step with its optimizer with those of the plan."""
        predicted = step.plan.memory.peak
        # The optimizer has its state from the second step on.
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            step.train()
            step.optimizer.step()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self._before
        ratio = peak / (LARGE * predicted + WORKSPACES)
        figure = f"{format_bytes(peak)} allocated, planned {format_bytes(predicted)}"
        advice = "Leave so much more room in memory_limit, and report this line." if ratio > 1 else ""
        values = {"measured": float(peak), "predicted": float(predicted)}
        return CheckOutcome("slow" if ratio > 1 else "ok", figure, advice, values, ratio)

    def hidden_share(self, step: ProfiledStep) -> CheckOutcome:
        """Measure the share of the time of communication in which other kernels run."""
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            step.train()
            torch.cuda.synchronize()
        kernels = [
            (event.name, (event.time_range.start, event.time_range.end))
            for event in trace.events() or ()
            if event.device_type.name == "CUDA"
        ]
        communication = _union(span for name, span in kernels if name.startswith("nccl"))
        compute = _union(span for name, span in kernels if not name.startswith("nccl"))
        if not communication:
            return CheckOutcome("ok", "the step has no communication")
        total = sum(end - start for start, end in communication)
        share = _overlap_length(communication, compute) / total
        return CheckOutcome("ok", f"{share:.0%} of {format_seconds(total * 1e-6)}", "", {"share": share})

    def synchronisations(self, step: ProfiledStep) -> CheckOutcome:
        """Count the times that the host waits for the device inside a step."""
        mode = torch.cuda.get_sync_debug_mode()
        # CUDA's debug mode reports each synchronisation as a warning, at the line that waited.
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                step.train()
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        places = [f"{entry.filename}:{entry.lineno}" for entry in caught if _WAITED in str(entry.message)]
        values = {"synchronisations": float(len(places))}
        if not places:
            return CheckOutcome("ok", "none", "", values)
        advice = "The host waits there and queues no kernels: report this line."
        return CheckOutcome("slow", f"{len(places)}, the first at {places[0]}", advice, values, float(len(places)))

    def host(self, step: ProfiledStep) -> CheckOutcome:
        """Compare the time in which the host queues a step with the time of the step."""
        seconds = statistics.median(_time_queueing(step.train) for _ in range(_STEPS))
        ratio = seconds / self._seconds
        figure = f"{format_seconds(seconds)} of {format_seconds(self._seconds)}"
        slow = ratio > 0.9
        advice = "The device waits for the host: try compile=True, or a larger batch per device." if slow else ""
        return CheckOutcome("slow" if slow else "ok", figure, advice, {"seconds": seconds}, ratio)

    def _make_step(self, processes: Processes) -> ProfiledStep:
        on_cuda = processes.device.type == "cuda"
        if on_cuda:
            torch.cuda.synchronize()
            self._before = torch.cuda.memory_allocated()
        # A GPU runs the large model in some milliseconds, a CPU the other in a tenth of a second.
        large = {"layers": 4, "width": 2048, "head": 128, "length": 1024}
        sizes = large if on_cuda else {"width": 128, "head": 32, "length": 64}
        make = functools.partial(models.gpt, batch=4 * processes.size, **sizes)
        dtype = torch.bfloat16 if on_cuda else torch.float32
        module, inputs = copy_model_to(make_seeded(make, processes.size), processes.device, dtype)
        autoshard.parallelize(module, processes.mesh(), (), inputs, cluster=self._cluster, optimizer="adamw")
        plan = module.sharding_plan
        assert isinstance(plan, autoshard.ShardingPlan)
        return ProfiledStep(module, inputs, torch.optim.AdamW(module.parameters()), plan)


def _time_run(run: Callable[[], None], processes: Processes) -> float:
    """Return seconds of a run, from the arrival of all ranks until the device is done."""
    _synchronize(processes.device)
    dist.barrier()
    start = time.perf_counter()
    run()
    _synchronize(processes.device)
    return time.perf_counter() - start


def _time_queueing(run: Callable[[], None]) -> float:
    """Return seconds until the host has queued a run."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    torch.cuda.synchronize()
    return seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


Span = tuple[float, float]


def _union(spans: Iterable[Span]) -> list[Span]:
    """Return the union of spans, as disjoint spans in order."""
    united: list[Span] = []
    for start, end in sorted(spans):
        if united and start <= united[-1][1]:
            united[-1] = united[-1][0], max(united[-1][1], end)
        else:
            united.append((start, end))
    return united


def _overlap_length(first: list[Span], second: list[Span]) -> float:
    """Return the length of the intersection of two lists of disjoint spans."""
    return sum(max(0.0, min(end, until) - max(start, since)) for start, end in first for since, until in second)
