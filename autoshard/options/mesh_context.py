"""The mesh for `torch.compile(model, backend="autoshard")`, set by a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.distributed.device_mesh import DeviceMesh

# A context variable, not a global: threads may compile for different meshes.
_mesh: ContextVar[DeviceMesh | None] = ContextVar("autoshard_mesh", default=None)


@contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Context in which `torch.compile(model, backend="autoshard")` shards over `mesh`.

    It must enclose the first call of the compiled model; later calls keep the mesh. An inner context overrides an outer
    one, and the backend's option `mesh` overrides both.
    """
    token = _mesh.set(mesh)
    try:
        yield mesh
    finally:
        _mesh.reset(token)  # to the mesh of the outer context, if there is one


def mesh_in_use() -> DeviceMesh | None:
    """Return the mesh of the innermost context; None outside any."""
    return _mesh.get()
