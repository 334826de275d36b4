"""The command `autoshard`: plan models, check them, measure a cluster, and print saved plans."""

from autoshard.tools.cli.command_line import main

__all__ = ["main"]
