"""Replay of the operations of a plan, event by event, to predict its seconds."""

from __future__ import annotations

from autoshard.simulate.events import COMPUTE, Operation, Timeline, link_stream, replay

__all__ = ["COMPUTE", "Operation", "Timeline", "link_stream", "replay"]
