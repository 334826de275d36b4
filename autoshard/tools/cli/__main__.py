"""`python -m autoshard.cli`: the command `autoshard`."""

import sys

from autoshard.tools.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
