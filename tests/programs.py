"""Programs as `python` and `torchrun` start them, or in processes forked from one that has imported what they need."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch

from tests.workers import USUAL, Origin, keep_what_is_imported, start

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 500.0
"""After which a program counts as hanging."""


JOB = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that tell a process that it is a rank of a job."""


def _outside_jobs() -> dict[str, str]:
    """The environment of a shell in which somebody types a command."""
    return {name: value for name, value in os.environ.items() if name not in JOB}


def run_by_command(file: Path, processes: int | None, folder: Path, *arguments: str) -> str:
    """What a program prints when its command starts it.

    Args:
        file: the program.
        processes: how many torchrun starts; `python` starts one where it is None.
        folder: for temporary files, and what the program writes.
        arguments: of the program.
    """
    launcher: list[str] = []
    if processes:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    done = subprocess.run(
        [sys.executable, *launcher, str(file), *arguments],
        cwd=folder,
        env=_outside_jobs() | _settings(folder) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return _check_exit(file, [done.returncode], done.stdout, done.stderr)


def run_by_fork(file: Path, processes: int | None, folder: Path, *arguments: str, origin: Origin = USUAL) -> str:
    """The same, without the seconds of imports: the processes have the environment that torchrun gives them."""
    world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(processes)}
    world |= {"LOCAL_WORLD_SIZE": str(processes), "TORCHELASTIC_RUN_ID": "none"}
    started: list[Any] = []
    for rank in range(processes or 1):
        ranks = world | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if processes else {}
        run = (str(file), arguments, _settings(folder) | ranks, str(folder), str(folder / f"rank-{rank}"))
        started.append(start(rank, _run, *run, origin=origin))
    codes = _wait_for_all(started)
    paths = {kind: sorted(folder.glob(f"rank-*.{kind}")) for kind in _KINDS}
    said = {kind: "".join(path.read_text("utf-8") for path in paths[kind]) for kind in _KINDS}
    for path in (*paths["out"], *paths["err"]):
        path.unlink()  # the next program in this folder may have fewer ranks, or print less
    return _check_exit(file, codes, said["out"], said["err"])


def _wait_for_all(started: Sequence[Any]) -> list[int | None]:
    """Exit codes once all have ended, or soon after one has failed, which others may be waiting for: None of those."""
    deadline = time.monotonic() + SECONDS
    while running := [process for process in started if process.exitcode is None]:
        failed = any(process.exitcode for process in started)
        patience = 5.0 if failed else max(0.0, deadline - time.monotonic())
        if not wait([process.sentinel for process in running], patience):
            break
    codes = [process.exitcode for process in started]
    for process in started:
        process.kill()
    return codes


_KINDS = ("out", "err")


def _run(file: str, arguments: Sequence[str], environment: Mapping[str, str], folder: str, printed: str) -> None:
    for kind, stream in zip(_KINDS, (sys.stdout, sys.stderr), strict=True):
        os.dup2(os.open(f"{printed}.{kind}", os.O_WRONLY | os.O_CREAT), stream.fileno())
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None  # what was imported may have asked for it
    torch.set_num_threads(1)
    keep_what_is_imported()
    sys.argv = [file, *arguments]
    sys.path.insert(0, str(Path(file).parent))
    runpy.run_path(file, run_name="__main__")


def _settings(folder: Path) -> dict[str, str]:
    return {"TMPDIR": str(folder), "COLUMNS": "160"}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def _check_exit(file: Path, codes: Sequence[int | None], out: str, err: str) -> str:
    assert codes == [0] * len(codes), f"{file.name} failed, exit codes {codes}:\n{out}\n{err}"
    assert "has no rule" not in err
    return out
