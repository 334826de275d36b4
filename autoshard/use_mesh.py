"""The device mesh of a stretch of a program, for callers that can't be given one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch.distributed.device_mesh import DeviceMesh

_mesh: ContextVar[DeviceMesh | None] = ContextVar("autoshard_mesh", default=None)


@contextmanager
def use_mesh(mesh: DeviceMesh) -> Iterator[DeviceMesh]:
    """Context in which `torch.compile(model, backend="autoshard")` shards over `mesh`.

    What counts is the first call of the compiled model; calls after it keep the mesh. An inner context goes before an
    outer one, and the backend's own option `mesh` before both.
    """
    token = _mesh.set(mesh)
    try:
        yield mesh
    finally:
        _mesh.reset(token)


def current_mesh() -> DeviceMesh | None:
    """The mesh of the innermost `use_mesh` around the caller, if there is one."""
    return _mesh.get()
