"""The verbs of the command, and its exit status.

torch is loaded by the verb that is asked for: `--version` and `--help` answer without it.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from autoshard import AutoshardError, __version__
from autoshard.tools.cli.arguments import UsageError, print_error

_VERBS = {
    "plan": ("planning", "plan a model on a mesh, without devices"),
    "fits": ("planning", "tell by the exit status whether a model fits on a mesh"),
    "compare": ("planning", "compare the plan of a model with standard layouts, and print flags of other tools"),
    "search": ("planning", "find the best mesh of so many devices, and its plan"),
    "frontier": ("planning", "list every plan on a mesh that is worth its memory"),
    "why": ("why", "tell why a plan does not place parameters otherwise, by what that would cost"),
    "simulate": ("simulation", "print where the predicted step of a plan spends its time, and write it as a trace"),
    "show": ("saved_plans", "print a saved plan as tables"),
    "explain": ("saved_plans", "print the strategies and costs of parameters and modules of a saved plan"),
    "html": ("saved_plans", "write a saved plan as a self-contained web page"),
    "verify": ("verification", "compare the numbers of a plan on all ranks with those of one device"),
    "doctor": ("checking", "check if a model can be captured and sharded"),
    "calibrate": ("calibration", "measure this cluster; start with torchrun, one process per device"),
    "selfcheck": ("checking", "check autoshard on a new machine; start with torchrun, one process per device"),
}
"""Verb -> the module of this room whose `add_<verb>` makes its parser, and a line for the help of the command."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments, by default those of the process.

    Returns:
        The exit status, with the reason on standard error where it is not 0. 2: an argument is not valid, and nothing
        was planned. 1: no plan fits, a model cannot be captured, or a saved plan is not valid. 130: Ctrl-C, before
        there was anything to show.
    """
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        # Verbs that cannot fail by themselves return None.
        return int(options.run(options) or 0)
    except UsageError as error:
        print_error(error)
        return 2
    except (AutoshardError, OSError) as error:
        print_error(error)
        return 1
    except KeyboardInterrupt:
        sys.stderr.write("autoshard: interrupted\n")
        return 130  # as shells count a process that SIGINT ends


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of the verb among these arguments; `run` is the function that runs it.

    Raises:
        SystemExit: an argument is not known, or help or the version was asked for and printed.
    """
    parser = argparse.ArgumentParser(
        prog="autoshard",
        description="Plan the sharding of models, check models, measure clusters, and show saved plans.",
        epilog="autoshard COMMAND --help shows the options of a command and an example.",
    )
    version = f"autoshard {__version__} (torch {importlib.metadata.version('torch')})"
    parser.add_argument("--version", action="version", version=version)
    verbs = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    asked = arguments[0] if arguments else None
    for verb, (module, summary) in _VERBS.items():
        if verb == asked:
            getattr(importlib.import_module(f"autoshard.tools.cli.{module}"), f"add_{verb}")(verbs)
        else:
            verbs.add_parser(verb, help=summary)
    return parser.parse_args(arguments)
