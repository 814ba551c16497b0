"""The command line: one module for each command."""

import os
import signal
import sys

_STOP_IN_THEIR_OWN_WAY = ("up", "engine")


def main() -> None:
    """The entry point ``shmsched``."""
    # Before there is anything to clean up, and while modules are loaded, an interrupt ends it like anything else: without a trace.
    interrupts = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interrupts:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from shmsched.surroundings import UTF_8, settle_in

    if sys.getfilesystemencoding() != "utf-8":
        # A locale that is not UTF-8: arguments, paths and what children are told are UTF-8 all the same. Python must be told first.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **UTF_8})

    settle_in(hold=sys.argv[1:2] != [] and sys.argv[1] in _STOP_IN_THEIR_OWN_WAY)
    from shmsched.cli.root import run

    if interrupts:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
