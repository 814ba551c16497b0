"""Beginnings for the demo's sessions to go on with."""

from __future__ import annotations

_PROMPTS = (
    "The lighthouse keeper climbed the stairs one last time and",
    "The best thing about living near the sea is",
    "A good soup starts with",
    "The first rule of writing software is",
    "Once upon a time there was a clockmaker who",
    "Bees are important because",
    "Dear neighbour, I am writing to you about",
    "On the third day of the expedition we",
    "The history of the bicycle begins",
    "When the train finally arrived,",
    "The three most common mistakes in chess are",
    "In the small town where I grew up,",
    "Mountains are formed when",
    "The detective looked at the empty chair and",
    "To make a paper boat, first",
    "The museum's oldest painting shows",
)


def prompts(n: int, first: str | None) -> list[str]:
    """``n`` prompts, beginning with ``first`` if there is one, and from the start again when they run out."""
    built_in = [_PROMPTS[i % len(_PROMPTS)] for i in range(n)]
    return built_in if first is None else [first, *built_in][:n]
