"""The command line: one module for each command."""

import sys

_STOP_IN_THEIR_OWN_WAY = ("up", "engine")


def main() -> None:
    """The entry point ``shmsched``."""
    from shmsched.surroundings import settle_in

    settle_in(hold=sys.argv[1:2] != [] and sys.argv[1] in _STOP_IN_THEIR_OWN_WAY)
    from shmsched.cli.root import run

    sys.exit(run(sys.argv[1:]))
