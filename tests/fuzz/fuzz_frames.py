"""Coverage-guided fuzzing of framing and frames: as ``fuzz_daemon.py``, with the corpus ``tests/fuzz/corpus/frames``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import atheris

os.environ["SHMSCHED_INTERPRETED"] = "1"  # coverage sees Python alone
sys.path.insert(0, str(Path(__file__).parent.parent))

with atheris.instrument_imports(include=["shmsched.wire"]):
    from fuzz.streams import read_stream


def main() -> None:
    atheris.Setup(sys.argv, read_stream)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
