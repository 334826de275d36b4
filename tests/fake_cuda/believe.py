"""A process that imports this believes in GPUs from then on, as those do that are forked from it."""

from __future__ import annotations

import os

from tests.fake_cuda.devices import install_fake_gpus

SHIM = "FAKE_CUDA_SHIM"
"""The variable that names the shim."""

if SHIM in os.environ:
    install_fake_gpus(os.environ[SHIM], 0)
