"""The mesh that `torch.compile(model, backend="autoshard")` shards over, given by a context."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.distributed.device_mesh import DeviceMesh

# A context variable and not a global: threads compile for meshes of their own.
_mesh: ContextVar[DeviceMesh | None] = ContextVar("autoshard_mesh", default=None)


@contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Context in which `torch.compile(model, backend="autoshard")` shards over `mesh`.

    It must be around the first call of the compiled model; later calls keep the mesh. An inner context overrides an
    outer one, and the backend's own option `mesh` overrides both.
    """
    token = _mesh.set(mesh)
    try:
        yield mesh
    finally:
        _mesh.reset(token)  # to the mesh of the outer context, if there is one


def mesh_in_use() -> DeviceMesh | None:
    """Return the mesh of the innermost context; None outside of all."""
    return _mesh.get()
