"""What ``generate_text`` is asked for: checked at the call, though its text begins only once somebody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from shmsched.arguments import text
from shmsched.client.core import checked_model, checked_options, checked_seed
from shmsched.client.generation.start import checked_wishes
from shmsched.client.submission import checked_deadline
from shmsched.params import SamplingParams


def check_text_request(
    prompt: str,
    model: str | None,
    max_new_tokens: int,
    sampling: SamplingParams,
    stop: Sequence[str],
    seed: int | None,
    options: bytes,
    deadline: float | None,
) -> tuple[str, ...]:
    """The stop texts. Raises InvalidRequest."""
    text("prompt", prompt)
    checked_model(model)
    checked_seed(seed)
    checked_options(options)
    if deadline is not None:
        checked_deadline(deadline)
    return checked_wishes(max_new_tokens, sampling, stop)[1]
