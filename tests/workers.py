"""Real processes over gloo that serve one call after another, forked from one that has imported all they need."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import popen_forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from tests import gloo


class Origin(NamedTuple):
    """What a process that others are forked from has imported, and the variables that it has while it does so.

    Seconds of imports, once for all processes of all tests.
    """

    modules: tuple[str, ...] = ("tests.training", "transformers.models.gpt2.modeling_gpt2")
    variables: tuple[tuple[str, str], ...] = ()


USUAL = Origin()

SEEDS = ("1", "3")
"""Of hashes, for even and odd ranks: sets of texts have another order in each, as on ranks of a cluster."""


@functools.cache
def _server(seed: str, origin: Origin) -> ForkServer:
    """A process that has imported all that, and has such a seed; others are forked from it."""
    server = ForkServer()
    server.set_forkserver_preload(list(origin.modules))
    # Inductor's scalar loops compile in two thirds of the time of its vectors, and without a probe of the processor.
    variables = {"PYTHONHASHSEED": seed, "TORCHINDUCTOR_VEC_ISA_OK": "0"} | dict(origin.variables)
    with mock.patch.dict(os.environ, variables):
        server.ensure_running()
    return server


def start(rank: int, function: Callable[..., Any], *args: Any, origin: Origin = USUAL) -> Any:
    """A new process that calls `function(*args)` as a rank."""
    process = multiprocessing.get_context("forkserver").Process(target=function, args=args, daemon=True)
    server = _server(SEEDS[rank % len(SEEDS)], origin)
    # The context knows one server alone.
    with mock.patch.object(popen_forkserver.forkserver, "connect_to_new_process", server.connect_to_new_process):
        process.start()
    return process


class Workers:
    """`size` processes with a gloo process group over all of them.

    Args:
        size: number of processes.
        timeout: seconds after which a call counts as hanging.
    """

    def __init__(self, size: int, timeout: float = 300.0) -> None:
        self.size = size
        self.timeout = timeout
        self._processes: list[Any] = []
        self._connections: list[Connection] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(*args)` on every process; results by rank.

        Args:
            function: stands at the top of a module, since it is pickled.
            args: can be pickled, as the results can.

        Raises:
            AssertionError: the function failed on some rank, or hangs. The processes are started anew then: they may
                be waiting for each other.
        """
        if not self._processes:
            self._start()
        for connection in self._connections:
            connection.send((function, args))
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self.size:
            pending = [one for rank, one in enumerate(self._connections) if rank not in answers]
            failed = any(kind == "error" for kind, _ in answers.values())
            ready = wait(pending, 5.0 if failed else self.timeout)
            if not ready:
                break
            answers |= {self._connections.index(one): _receive(one) for one in ready}  # type: ignore[arg-type]
        errors = [f"rank {rank}: {text}" for rank, (kind, text) in sorted(answers.items()) if kind == "error"]
        hanging = [str(rank) for rank in range(self.size) if rank not in answers]
        if errors or hanging:
            self.close()
            told = [f"no answer from ranks {', '.join(hanging)}"] if hanging else []
            raise AssertionError("\n".join([*errors, *told]))
        return [answers[rank][1] for rank in range(self.size)]

    def _start(self) -> None:
        store = str(Path(tempfile.mkdtemp(), "store"))
        for rank in range(self.size):
            ours, theirs = multiprocessing.Pipe()
            self._processes.append(start(rank, _serve, rank, self.size, store, theirs))
            theirs.close()
            self._connections.append(ours)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _receive(connection: Connection) -> tuple[str, Any]:
    try:
        kind, value = connection.recv()
    except (EOFError, ConnectionError):
        return "error", "the process ended"
    return str(kind), value


def keep_what_is_imported() -> None:
    """Look for garbage among new objects alone, and rarely, as in tests/conftest.py."""
    gc.freeze()
    gc.set_threshold(50_000)


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    """What a process does: one call after another, until its connection closes."""
    torch.set_num_threads(1)
    keep_what_is_imported()
    # As torchrun sets them on one host; accelerate looks for other machines without the last.
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    dist.init_process_group(gloo.register(), f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        try:
            torch.manual_seed(0)
            connection.send(("result", function(*args)))
        except BaseException:
            connection.send(("error", traceback.format_exc()))
