"""The processes of the self-check, one of which is this one."""

from __future__ import annotations

import os

import pytest
import torch.distributed as dist

from autoshard.selfcheck.processes import Processes

WAIT = "TORCH_NCCL_BLOCKING_WAIT"


@pytest.mark.parametrize("asked", [None, "0"])
def test_what_the_user_asked_of_nccl_is_put_back(asked: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if asked is None:
        monkeypatch.delenv(WAIT, raising=False)
    else:
        monkeypatch.setenv(WAIT, asked)
    processes = Processes.of_job()
    processes.start()
    assert dist.is_initialized()
    assert os.environ[WAIT] == "1"
    processes.start(blocking=False)
    assert os.environ[WAIT] == "0"
    processes.stop()
    assert not dist.is_initialized()
    assert os.environ.get(WAIT) == asked
