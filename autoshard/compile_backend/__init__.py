"""The backend `autoshard` of `torch.compile`."""

from __future__ import annotations

from autoshard.compile_backend.backend import autoshard

__all__ = ["autoshard"]
