"""This process believes that it has eight GPUs, one of which is the current one. There is no way back."""

from __future__ import annotations

import ctypes
import os
import sys
from types import SimpleNamespace
from typing import Any, NoReturn

PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    warp_size=32,
)


def install_fake_gpus(shim: str, device: int) -> None:
    """Have torch answer as on a machine of eight H100s, where `device` is the current one.

    To be called before torch is imported, which asks for CUDA's hooks once.
    """
    library = ctypes.CDLL(shim)

    import torch

    def set_device(chosen: Any) -> None:
        index = chosen if isinstance(chosen, int) else torch.device(chosen).index
        library.fake_cuda_set_device(0 if index is None else index)

    answers: dict[str, Any] = {
        # `is_available` stays False: else torch goes on to ask the driver.
        "is_initialized": lambda: True,
        "device_count": lambda: int(library.fake_cuda_device_count()),
        "current_device": lambda: int(library.fake_cuda_current_device()),
        "set_device": set_device,
        "get_device_name": lambda *asked: PROPERTIES.name,
        "get_device_capability": lambda *asked: (PROPERTIES.major, PROPERTIES.minor),
        "get_device_properties": lambda *asked: PROPERTIES,
        "is_bf16_supported": lambda *asked, **options: True,
        # A state is a tensor with numbers, which fake ones have not.
        "get_rng_state": lambda *asked: None,
        "set_rng_state": lambda *said: None,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    torch.cuda.default_generators = tuple(torch.Generator() for _ in range(library.fake_cuda_device_count()))
    set_device(device)


def exit_process() -> NoReturn:
    """End the process at once: threads that torch starts for such devices may abort it while it ends by itself."""
    sys.stdout.flush()
    os._exit(0)
