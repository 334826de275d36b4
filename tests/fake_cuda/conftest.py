"""What makes torch believe in GPUs, compiled for the tests of this folder."""

from __future__ import annotations

import pytest
import torch

from tests.fake_cuda.believe import SHIM
from tests.fake_cuda.build import compile_shim, compiler
from tests.workers import USUAL, Origin


@pytest.fixture(scope="session")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> Origin:
    """Of processes that believe in eight GPUs: `torch.cuda.set_device` chooses that of a rank."""
    if torch.backends.cuda.is_built():
        pytest.skip("this build of torch knows GPUs itself, and takes no other hooks: these tests need one for CPUs")
    found = compiler()
    if found is None:
        pytest.skip("no C++ compiler: what makes torch believe in GPUs is compiled from tests/fake_cuda/guard.cpp")
    shim = compile_shim(found, tmp_path_factory.mktemp("shim"))
    return Origin(("tests.fake_cuda.believe", "tests.fake_cuda.rank", *USUAL.modules), ((SHIM, str(shim)),))
