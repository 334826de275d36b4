"""The outcome of a check, on one rank and on all, and the processes of the job, which agree on it."""

from __future__ import annotations

import json
import math
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from itertools import count
from typing import Any, Literal

import torch
import torch.distributed as dist
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autoshard import AutoshardError, __version__
from autoshard.tools.selfcheck._torch import HashStore, PrefixStore, Store, one_thread_gloo, rendezvous

Verdict = Literal["ok", "skipped", "slow", "wrong"]
# From the best to the worst, with their styles in a terminal.
_STYLES: dict[Verdict, str] = {"ok": "green", "skipped": "dim", "slow": "yellow", "wrong": "bold red"}
VERDICTS = tuple(_STYLES)


@dataclass(frozen=True, slots=True)
class CheckOutcome:
    """The outcome of one check.

    Attributes:
        verdict: `"ok"`; `"slow"`: right, but slower or larger than predicted; `"wrong"`; or `"skipped"`.
        figure: the number behind the verdict, or the reason, as text.
        advice: for the user; empty where there is nothing to do.
        values: the numbers in the figure, by name; seconds, bytes and relative differences.
        ratio: the worst of the numbers over its limit, if there is one.
        failure: of a check that raised, the position of this rank among those that failed, by time; else None.
    """

    verdict: Verdict
    figure: str
    advice: str = ""
    values: dict[str, float] = field(default_factory=dict)
    ratio: float = 0.0
    failure: int | None = None

    def to_json(self) -> str:
        """Return the outcome as text, for other ranks."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class CheckLine:
    """A row of the table: the name of a check, its outcome on all ranks, and the seconds that it took."""

    name: str
    outcome: CheckOutcome
    seconds: float = 0.0


def worst_outcome(outcomes: Sequence[CheckOutcome]) -> CheckOutcome:
    """Return the outcome that stands for all ranks.

    That is the first failure, else the worst verdict, and of equal verdicts the largest ratio. Of several ranks, a
    wrong one is named.
    """
    # A rank that failed may have left others waiting, which fail in turn: their failures say nothing.
    failures = [outcome.failure for outcome in outcomes if outcome.failure is not None]

    def badness(rank: int) -> tuple[bool, int, float]:
        outcome = outcomes[rank]
        first = bool(failures) and outcome.failure == min(failures)
        return first, VERDICTS.index(outcome.verdict), outcome.ratio

    # The first of equal ranks, on every rank: all report the same outcome.
    rank = max(range(len(outcomes)), key=badness)
    worst = outcomes[rank]
    if worst.verdict == "wrong" and len(outcomes) > 1:
        return replace(worst, figure=f"rank {rank}: {worst.figure}")
    return worst


def verdict_of(lines: Sequence[CheckLine]) -> Verdict:
    """Return the worst verdict of all lines."""
    return max((line.outcome.verdict for line in lines), key=VERDICTS.index, default="ok")


def result_table(lines: Sequence[CheckLine], machine: str, seconds: float) -> Group:
    """Return the lines for a terminal, with the machine above and the counts of verdicts below."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("check", no_wrap=True)
    rows.add_column("verdict", no_wrap=True)
    rows.add_column("figure", overflow="fold", ratio=3)
    rows.add_column("what to do", overflow="fold", ratio=2)
    for line in lines:
        outcome = line.outcome
        styled = Text(outcome.verdict, style=_STYLES[outcome.verdict])
        rows.add_row(Text(line.name), styled, Text(outcome.figure), Text(outcome.advice))
    verdicts = [line.outcome.verdict for line in lines]
    counts = ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in VERDICTS if verdict in verdicts)
    return Group(Text(f"autoshard {__version__} on {machine}"), rows, Text(f"{counts}, in {seconds:.0f} s"))


def result_data(lines: Sequence[CheckLine], machine: str, seconds: float) -> dict[str, Any]:
    """Return the lines for a file of JSON, in which a number that is not finite is null."""
    return {
        "autoshard": __version__,
        "torch": torch.__version__,
        "machine": machine,
        "seconds": seconds,
        "verdict": verdict_of(lines),
        "lines": [
            {
                "check": line.name,
                "seconds": line.seconds,
                "verdict": line.outcome.verdict,
                "figure": line.outcome.figure,
                "advice": line.outcome.advice,
                "values": {
                    # JSON has no infinity: readers other than Python's refuse it.
                    name: value if math.isfinite(value) else None
                    for name, value in line.outcome.values.items()
                },
            }
            for line in lines
        ],
    }


FAILED = "The check could not be finished. Run it alone by --only, and report the message with your torch version."
_BLOCKING_WAIT = "TORCH_NCCL_BLOCKING_WAIT"
# Time limits of a collective that a rank may be late after a check, in which it plans and compiles.
_PATIENCE = 5


class RankLostError(AutoshardError):
    """A rank did not report its outcome."""


class Processes:
    """This process among those of the job.

    Ranks agree through the store and not by a collective: after a failure on one rank, others may still be inside one.

    Args:
        store: that all processes reach.
        rank: of this process.
        size: number of processes.
        device: where this process computes.
        timeout: seconds that a collective may take.
        on_one_host: True if all processes share a host, and with it a folder.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        device: torch.device,
        timeout: float = 60.0,
        on_one_host: bool = True,
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self.on_one_host = on_one_host
        self._store = store
        self._timeout = timedelta(seconds=timeout)
        # All ranks count alike, as they make the same calls: equal numbers name equal groups and checks.
        self._groups, self._checks = count(), count()
        # The user's setting, which `stop` restores.
        self._waits = os.environ.get(_BLOCKING_WAIT)

    @staticmethod
    def of_job(timeout: float = 60.0) -> Processes:
        """Return the processes that torchrun started; this one alone if torchrun did not start it."""
        if not dist.is_torchelastic_launched():
            return Processes(HashStore(), 0, 1, _device(0, 1), timeout)
        store, rank, size = next(iter(rendezvous("env://", timeout=timedelta(seconds=_PATIENCE * timeout))))
        local, on_host = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Processes(store, rank, size, _device(local, on_host), timeout, on_host == size)

    def start(self, blocking: bool = True) -> None:
        """Make the process group, in place of an older one.

        Args:
            blocking: True if the host waits for collectives of NCCL, so that one that hangs raises an error here and
                does not end the process. A profile needs False.
        """
        self.stop()
        # NCCL reads it whenever a group is made; there is no other way to set it.
        os.environ[_BLOCKING_WAIT] = str(int(blocking))
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.set_device(self.device)
        # A prefix of its own for every group: keys of an older group may still be in the store.
        store = PrefixStore(f"group {next(self._groups)}", self._store)
        backend = "nccl" if on_cuda else one_thread_gloo()
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size, timeout=self._timeout)

    def stop(self) -> None:
        """End the process group, if there is one; collectives in which other ranks wait for this one then fail."""
        if dist.is_initialized():
            dist.destroy_process_group()
        os.environ.pop(_BLOCKING_WAIT, None)
        if self._waits is not None:
            os.environ[_BLOCKING_WAIT] = self._waits

    def mesh(self, sizes: Sequence[int] | None = None, names: Sequence[str] = ("x",)) -> DeviceMesh:
        """Return a mesh of all processes; by default with one axis."""
        return init_device_mesh(self.device.type, tuple(sizes or (self.size,)), mesh_dim_names=tuple(names))

    def agree(self, check: Callable[[Processes], CheckOutcome]) -> CheckOutcome:
        """Run a check on every rank, and return the worst outcome of all.

        A failure on any rank is the check's outcome, never an exception; new groups are made after it.

        Raises:
            RankLostError: a rank did not answer in time, or groups could not be made anew; no further check can run.
        """
        name = f"check {next(self._checks)}"
        try:
            outcome = check(self)
        except Exception as error:
            order = self._store.add(f"{name}: failures", 1)
            outcome = CheckOutcome("wrong", _message(error), FAILED, failure=order)
            self.stop()
        outcomes = self._exchange(name, outcome)
        if any(result.failure is not None for result in outcomes):
            try:
                self.start()
            except Exception as error:
                raise RankLostError(f"no process group could be made after a failure: {_message(error)}") from error
        return worst_outcome(outcomes)

    def _exchange(self, name: str, outcome: CheckOutcome) -> list[CheckOutcome]:
        self._store.set(f"{name}: {self.rank}", outcome.to_json())
        outcomes = []
        for rank in range(self.size):
            key = f"{name}: {rank}"
            try:
                self._store.wait([key], _PATIENCE * self._timeout)
            except Exception as error:
                limit = _PATIENCE * self._timeout.total_seconds()
                raise RankLostError(
                    f"rank {rank} said nothing for {limit:.0f} s: its process ended, or hangs. Look at its output "
                    "(torchrun --tee 3), and raise --timeout where the machine is only slow."
                ) from error
            outcomes.append(CheckOutcome(**json.loads(self._store.get(key))))
        return outcomes


def _device(local_rank: int, processes: int) -> torch.device:
    """Return the CUDA device of that number if there is one for every process of the host, else the CPU."""
    if torch.cuda.is_available() and processes <= torch.cuda.device_count():
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def _message(error: Exception) -> str:
    """Type and text of an error in short, and the line that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]} ({os.path.basename(place.filename)}:{place.lineno})"
