"""What makes torch believe in GPUs, compiled for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fake_cuda.build import compile_shim, compiler


@pytest.fixture(scope="package")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler: what makes torch believe in GPUs is compiled from tests/fake_cuda/guard.cpp")
    return compile_shim(found, tmp_path_factory.mktemp("shim"))
