"""Settings that every test shares."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator

import hypothesis
import pytest
import torch
import torch.distributed as dist

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
def two() -> Iterator[Workers]:
    """Two processes, for all tests that need as many."""
    with Workers(2) as started:
        yield started


@pytest.fixture(scope="session")
def four() -> Iterator[Workers]:
    """Four of them."""
    with Workers(4) as started:
        yield started


def pytest_configure(config: pytest.Config) -> None:
    """Processes that share the tests take files as they are ordered here; xdist would order them by number of tests."""
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with the most slow tests come first, so that no process is left with one while the others have ended."""
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through all of it for garbage time and again takes a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True)
def _same_start() -> Iterator[None]:
    """Every test begins with the same random state and default dtype, and leaves no process group behind."""
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
    if dist.is_initialized():
        dist.destroy_process_group()
