"""The ways in which a generation can be driven: all of them give the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmsched.client.generation import PromptLookup

DEADLINE = 30.0
ENGINES = Path(__file__).with_name("engines.py")
Ways = dict[str, dict[str, Any]]
WAYS: Ways = {
    "continuation": {},
    "client-driven": {"continuation": False},
    "processed": {"logits_processor": lambda tokens, row: row},
    "drafted": {"draft": PromptLookup()},
}
way_of = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
