"""What daemon, engines and clients printed during a test, though nobody knows such lines: a traceback above all.

Known lines are listed once, in ``shmsched.tools.load.said``. What a test is about and has its processes print, it announces:
``@pytest.mark.prints("regular expression", ...)``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from shmsched.tools.load.said import unknown


def unannounced(text: str, announced: Sequence[str] = ()) -> list[str]:
    """Lines that nobody knows and that match none of the patterns, which are searched for in each line.

    A traceback counts as one line: all of it is announced by what its last line holds.
    """
    return [
        block
        for block in _blocks(text)
        if unknown(block.splitlines()[-1:]) and not any(re.search(pattern, block) for pattern in announced)
    ]


def _blocks(text: str) -> list[str]:
    """Lines, and whole tracebacks: from their first line to the error's own."""
    blocks: list[str] = []
    inside = False
    for line in text.splitlines():
        if inside:
            blocks[-1] += "\n" + line
            # Its frames are indented, its end is not.
            inside = line.startswith(" ") or not line
        elif line.strip():
            blocks.append(line)
            inside = line.startswith(
                ("Traceback (most recent call last)", "Exception in thread", "Exception ignored in")
            )
    return blocks
