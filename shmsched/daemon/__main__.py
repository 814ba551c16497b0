"""``python -m shmsched.daemon``: what ``launch`` spawns, with its configuration on standard input. People use ``shmsched up``."""

from __future__ import annotations

import sys


def main() -> int:
    from shmsched.surroundings import settle_in

    settle_in(hold=True)
    from shmsched.daemon.running import run_launched

    return run_launched()


if __name__ == "__main__":
    sys.exit(main())
