"""Plans that move tensors to the host: the fastest of them under a memory limit, and the room that the host has."""

from __future__ import annotations

from autoshard.errors import BudgetError
from autoshard.planner.planner import Planner
from autoshard.units import format_bytes


def check_host(moved: int, planner: Planner) -> None:
    """Raise a `BudgetError` if the host has less room for one device than the bytes that a plan moves there."""
    room = planner.settings.host_memory
    if room is not None and moved > room:
        raise BudgetError(
            f"the plan moves {format_bytes(moved)} of every device to its host, which has {format_bytes(room)} for it "
            "(host_memory, or that of the cluster). Move less: take autoshard.offload() from some modules, use more "
            "devices, or raise host_memory."
        )
