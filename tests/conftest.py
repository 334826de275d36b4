"""Settings that every test shares."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

import autoshard.operators  # noqa: F401  # tests of rooms below it capture graphs, too
from tests.programs import JOB
from tests.workers import Workers

hypothesis.settings.register_profile(
    "autoshard",
    deadline=None,  # the first example of a test often pays for an import
    derandomize=True,  # a failure is seen by everybody or by nobody
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("autoshard")
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def processes() -> Iterator[dict[str, Workers]]:
    """Processes for all tests that need as many, by the name of the fixture; started by their first call."""
    with Workers(2) as two, Workers(4) as four:
        yield {"two": two, "four": four}


@pytest.fixture(scope="session")
def two(processes: dict[str, Workers]) -> Workers:
    """Two processes."""
    return processes["two"]


@pytest.fixture(scope="session")
def four(processes: dict[str, Workers]) -> Workers:
    """Four of them."""
    return processes["four"]


@pytest.fixture(scope="module", autouse=True)
def _no_idle_processes(request: pytest.FixtureRequest, processes: dict[str, Workers]) -> None:
    """End processes that a file does not need: they hold memory."""
    if not any(_needs_processes(item) for item in request.session.items if item.path == request.path):
        for workers in processes.values():
            workers.close()


def _needs_processes(item: pytest.Item) -> bool:
    return not {"two", "four"}.isdisjoint(getattr(item, "fixturenames", ()))


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the tests take files as they are ordered here; xdist would order them by number of tests.

    Of loggers that do not propagate pytest reads what they get: torch's trace of compilations is written for readers
    alone, with the stack of every fake tensor that is made, and takes a fifteenth of the time.
    """
    logging.getLogger("torch.__trace").propagate = True
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that need processes come first, which end behind the last of them; of each kind, those with the most slow
    tests, so that nobody is left with one while the others have ended."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    processes = {item.path for item in items if _needs_processes(item)}
    items.sort(key=lambda item: (item.path not in processes, -slow[item.path]))


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through all of it for garbage time and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """At its end pytest looks for garbage five times; what was kept for all tests is none."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test begins with the same random state and default dtype, and leaves no process group behind, nor the
    variables of a job: libraries set them, and what a later test starts would take itself for a rank."""
    torch.default_generator.manual_seed(0)  # `torch.manual_seed` formats the stack three times, for GPUs to come
    dtype = torch.get_default_dtype()
    job = {name: os.environ[name] for name in JOB if name in os.environ}
    yield
    for name in JOB:
        os.environ.pop(name, None)
    os.environ.update(job)
    torch.set_default_dtype(dtype)
    if dist.is_initialized():
        dist.destroy_process_group()
