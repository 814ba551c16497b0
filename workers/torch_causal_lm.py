"""The torch engine: any causal language model that transformers loads from a directory.

Each session has a cache of its own. A prefill chunk is a forward pass by itself; the decodes of a batch go through the
model together, their caches put side by side, shorter ones padded in front.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shmsched.engine import BatchView, Engine, EngineInfo, Limits
from shmsched.engine.options import whole
from shmsched.engine.taken import TakenSteps, runnable
from shmsched.errors import EngineStartError

try:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer
    from transformers.utils import logging
except ImportError as error:
    raise ImportError(f"{error}; it comes with pip install 'shmsched[torch]'") from error

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]


class TorchCausalLM(Engine):
    """Options: ``path`` of a directory written by ``save_pretrained``; ``max_sessions``; ``max_session_tokens`` (at most the
    model's context); ``dtype`` (``auto``: as saved; or ``float32``, ``bfloat16``, ...); ``device``; ``threads`` (default: torch's own
    choice)."""

    def __init__(
        self,
        path: str,
        *,
        max_sessions: int = 16,
        max_session_tokens: int = 4096,
        dtype: str = "auto",
        device: str = "cpu",
        threads: int | None = None,
    ) -> None:
        self._path = Path(path).expanduser().absolute()
        if not (self._path / "config.json").is_file():
            raise EngineStartError(f"torch: {self._path} has no config.json; name a directory made by save_pretrained")
        if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise EngineStartError(f"torch: dtype is {dtype!r}; it must be auto or a type of torch's, such as bfloat16")
        whole("torch", "max_sessions", max_sessions, 1, 2**31 - 1)
        whole("torch", "max_session_tokens", max_session_tokens, 1, 2**31 - 1)
        if threads is not None:
            whole("torch", "threads", threads, 1, 2**16, where="(leave it out for torch's own choice)")
        self._dtype, self._device, self._threads = dtype, device, threads
        config = AutoConfig.from_pretrained(self._path, local_files_only=True).get_text_config()
        if any(
            type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) for layer in DynamicCache(config=config).layers
        ):
            raise EngineStartError(f"torch: {self._path} is a {config.model_type} model, which keeps a recurrent state")
        self.info = EngineInfo(
            model=self._path.name,
            vocab_size=config.vocab_size,
            max_sessions=max_sessions,
            max_session_tokens=min(max_session_tokens, getattr(config, "max_position_embeddings", max_session_tokens)),
            stop_tokens=_stop_tokens(config),
        )
        self._caches: dict[int, DynamicCache] = {}
        self._lengths: dict[int, int] = {}

    def start(self, limits: Limits) -> None:
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        logging.disable_progress_bar()
        model = AutoModelForCausalLM.from_pretrained(self._path, local_files_only=True, dtype=self._dtype)
        self._model = model.to(self._device).eval()

    def open_session(self, slot: int, options: bytes) -> None:
        # Not told of the model's sliding windows it keeps every token, and a session can go back beyond them.
        self._caches[slot] = DynamicCache()
        self._lengths[slot] = 0

    def rewind(self, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[slot]:
            raise ValueError(
                f"rewind to {length} of the session in slot {slot}, which has {self._lengths[slot]} tokens"
            )
        # `crop` takes away as many tokens as a negative number says.
        self._caches[slot].crop(length - self._lengths[slot])
        self._lengths[slot] = length

    def fork_session(self, parent: int, slot: int, length: int) -> None:
        if not 0 <= length <= self._lengths[parent]:
            raise ValueError(
                f"fork of {length} tokens of the session in slot {parent}, which has {self._lengths[parent]}"
            )
        self._caches[slot] = copy.deepcopy(self._caches[parent])
        self._lengths[slot] = self._lengths[parent]
        self.rewind(slot, length)

    def close_session(self, slot: int) -> None:
        del self._caches[slot], self._lengths[slot]

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def forward(self, batch: BatchView) -> None:
        taken = TakenSteps.of(batch, runnable(batch, self._lengths, self.info))
        # Decodes whose lengths have the same number of bits go together: less than half of what they are padded to is waste.
        groups: dict[int, list[int]] = defaultdict(list)
        for i, (slot, _, length) in enumerate(taken.steps):
            held = self._lengths[slot]
            groups[held.bit_length() if held and length == 1 else -1 - i].append(i)
        for group in groups.values():
            steps = [taken.steps[i] for i in group]
            wanted = [np.flatnonzero((taken.outputs >= s.start) & (taken.outputs < s.start + s.length)) for s in steps]
            # Of a chunk any rows may be wanted; of decodes there is only one.
            keep = taken.outputs[wanted[0]] - steps[0].start if len(group) == 1 else np.zeros(1, np.int64)
            flat = np.concatenate([np.arange(s.start, s.start + s.length) for s in steps]).reshape(len(group), -1)
            logits = self._run([s.slot for s in steps], taken.tokens[flat], taken.positions[flat], keep)
            for rows, outputs in zip(logits, wanted, strict=True):
                if len(outputs):
                    batch.put_logits(int(taken.wanted[outputs[0]]), rows)

    def _run(self, slots: Sequence[int], tokens: Ints, positions: Ints, keep: Ints) -> Floats:
        """One forward pass of (n_sessions, n_tokens): the logits of the tokens ``keep``, (n_sessions, n_kept, vocab)."""
        cache, mask = (self._caches[slots[0]], None) if len(slots) == 1 else self._side_by_side(slots)
        result = self._model(
            self._tensor(tokens),
            position_ids=self._tensor(positions),
            attention_mask=mask,
            cache=cache,
            use_cache=True,
            logits_to_keep=self._tensor(keep),
        )
        for i, slot in enumerate(slots):
            self._lengths[slot] += tokens.shape[1]
            if len(slots) > 1:
                for own, common in zip(self._caches[slot].layers, cache.layers, strict=True):
                    own.update(common.keys[i : i + 1, :, -1:], common.values[i : i + 1, :, -1:])
        return np.asarray(result.logits.float().cpu().numpy())

    def _side_by_side(self, slots: Sequence[int]) -> tuple[DynamicCache, torch.Tensor]:
        """One cache of the sessions', padded in front, and the mask that hides the padding from the next token."""
        lengths = torch.tensor([self._lengths[slot] for slot in slots], device=self._device)
        longest = int(lengths.max())

        def padded(states: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(states, (0, 0, longest - states.shape[-2], 0))

        layers = zip(*(self._caches[slot].layers for slot in slots), strict=True)
        data = [
            (torch.cat([padded(x.keys) for x in layer]), torch.cat([padded(x.values) for x in layer]))
            for layer in layers
        ]
        mask = torch.arange(longest + 1, device=self._device) >= longest - lengths[:, None]
        return DynamicCache(data), mask.long()

    def _tensor(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)


def _stop_tokens(config: Any) -> tuple[int, ...]:
    """End of text: one token in some configurations, several in others."""
    found = getattr(config, "eos_token_id", None)
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)
