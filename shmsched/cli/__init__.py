"""The command line: one module for each command."""

import os
import sys

_STOP_IN_THEIR_OWN_WAY = ("up", "engine")


def main() -> None:
    """The entry point ``shmsched``."""
    from shmsched.surroundings import UTF_8, settle_in

    if sys.getfilesystemencoding() != "utf-8":
        # A locale that is not UTF-8: arguments, paths and what children are told are UTF-8 all the same. Python must be told first.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **UTF_8})

    settle_in(hold=sys.argv[1:2] != [] and sys.argv[1] in _STOP_IN_THEIR_OWN_WAY)
    from shmsched.cli.root import run

    sys.exit(run(sys.argv[1:]))
