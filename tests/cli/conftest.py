"""What the command line's tests share."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# The tiny model is the gemma tests': the only engine with a tokenizer that needs no download.
sys.path.append(str(Path(__file__).parent.parent / "workers"))


@pytest.fixture
def home() -> Iterator[Path]:
    """A directory with a short path, since a socket's path has a limit; the default socket lies in it."""
    path = Path(tempfile.mkdtemp(prefix="shmsched-cli-"))
    yield path
    shutil.rmtree(path)
