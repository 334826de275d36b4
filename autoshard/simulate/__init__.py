"""Replay of the operations of a plan, event by event, to predict its seconds."""
