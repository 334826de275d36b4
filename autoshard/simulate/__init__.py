"""A plan's seconds, event by event."""

from __future__ import annotations

from autoshard.simulate.events import COMPUTE, Operation, Timeline, link_stream, replay

__all__ = ["COMPUTE", "Operation", "Timeline", "link_stream", "replay"]
