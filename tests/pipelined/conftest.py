"""Processes that all tests of pipelines share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workers import Workers


@pytest.fixture(scope="session")
def two() -> Iterator[Workers]:
    with Workers(2, timeout=100.0) as started:
        yield started


@pytest.fixture(scope="session")
def four() -> Iterator[Workers]:
    with Workers(4, timeout=100.0) as started:
        yield started
