"""The command line: one module for each command."""

import sys


def main() -> None:
    """The entry point ``shmsched``."""
    from shmsched.cli.root import run

    sys.exit(run(sys.argv[1:]))
