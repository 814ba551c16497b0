"""What a model writes may hold anything, and a terminal obeys some of it."""

from __future__ import annotations

import unicodedata

KEPT = "\n\t"


def printable(text: str) -> str:
    """``text`` with control characters made visible as U+FFFD, but for line ends and tabs."""
    return "".join(c if c in KEPT or unicodedata.category(c) != "Cc" else "\ufffd" for c in text)
