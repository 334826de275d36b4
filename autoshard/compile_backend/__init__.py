"""`torch.compile(model, backend="autoshard")`, and the mesh that it shards over."""

from __future__ import annotations

from autoshard.compile_backend.backend import autoshard, use_mesh

__all__ = ["autoshard", "use_mesh"]
