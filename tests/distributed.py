"""Functions run by real processes over gloo."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing


def run(function: Callable[..., None], world_size: int, *args: Any) -> None:
    """Call `function(*args)` in `world_size` processes with a gloo process group; fails if it fails in any of them.

    The function and its arguments are pickled: it stands at the top of a module that can be imported.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    multiprocessing.spawn(_process, (function, world_size, port, args), nprocs=world_size, join=True)


def _process(rank: int, function: Callable[..., None], world_size: int, port: int, args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        function(*args)
    finally:
        dist.destroy_process_group()
