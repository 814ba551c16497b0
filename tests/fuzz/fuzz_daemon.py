"""Coverage-guided fuzzing of the daemon: ``pip install -e '.[fuzz]'``, then ``python tests/fuzz/fuzz_daemon.py CORPUS``.

Further arguments are libFuzzer's: ``-runs=100000``, ``-max_total_time=600``, ``-max_len=4096``. What it finds it writes to a
file ``crash-...``; put that into ``tests/fuzz/corpus/daemon``, where the default test run replays it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

os.environ["SHMSCHED_INTERPRETED"] = "1"  # coverage sees Python alone
sys.path.insert(0, str(Path(__file__).parent.parent))

with atheris.instrument_imports(include=["shmsched.daemon", "shmsched.wire", "shmsched.dataplane"]):
    from fuzz.actions import act_on, lying_world


def main() -> None:
    world = lying_world()
    atheris.Setup(sys.argv, lambda data: act_on(world, data))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
