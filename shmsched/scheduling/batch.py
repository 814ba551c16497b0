"""What one forward pass takes."""

from __future__ import annotations

from dataclasses import dataclass

from shmsched.steps import Request


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """The steps of one forward pass: decodes first, then prefill chunks, each in the order of admission.

    ``n_tokens`` is the sum of their tokens. A batch without steps is falsy.
    """

    requests: tuple[Request, ...] = ()
    n_tokens: int = 0

    def __len__(self) -> int:
        return len(self.requests)
