"""A plan's seconds, event by event."""

from __future__ import annotations

from autoshard.simulate.events import Operation, Stream, Timeline, replay

__all__ = ["Operation", "Stream", "Timeline", "replay"]
