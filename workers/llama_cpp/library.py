"""The library, quiet, and a model file opened with it."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Any

from shmsched.errors import EngineStartError

try:
    from llama_cpp import llama_cpp as llama
except ImportError as error:
    raise ImportError(f"{error}; it comes with pip install 'shmsched[llama]'") from error

__all__ = ["Model", "llama"]

_ERROR, _CONTINUED = 4, 5  # enum ggml_log_level in ggml.h
_NO_TOKEN = -1


def _log(level: int, text: bytes, _: Any) -> None:
    """llama.cpp reports hundreds of lines for each model it loads; what went wrong is for the engine's log."""
    global _is_error
    if level != _CONTINUED:
        _is_error = level == _ERROR
    if _is_error:
        sys.stderr.write(text.decode(errors="replace"))


_is_error = False
_log_callback = llama.llama_log_callback(_log)  # lives as long as llama.cpp may call it
llama.llama_log_set(_log_callback, None)
llama.llama_backend_init()


class Model:
    """A GGUF file opened by llama.cpp; with ``vocab_only`` its header and vocabulary, without its weights."""

    def __init__(self, path: str, *, vocab_only: bool = False, gpu_layers: int = 0) -> None:
        self.path = Path(path).expanduser().absolute()
        if not self.path.is_file():
            raise EngineStartError(f"there is no GGUF file {self.path}")
        params = llama.llama_model_default_params()
        params.vocab_only = vocab_only
        params.n_gpu_layers = gpu_layers
        self.pointer = llama.llama_model_load_from_file(str(self.path).encode(), params)
        if not self.pointer:
            raise EngineStartError(f"llama.cpp cannot load {self.path}; the lines above say why")
        self.vocab = llama.llama_model_get_vocab(self.pointer)
        self.vocab_size = int(llama.llama_vocab_n_tokens(self.vocab))

    def close(self) -> None:
        if self.pointer:
            llama.llama_model_free(self.pointer)
            self.pointer = None

    def metadata(self, key: str, default: str) -> str:
        buffer = ctypes.create_string_buffer(512)
        n = llama.llama_model_meta_val_str(self.pointer, key.encode(), buffer, len(buffer))
        return buffer.value.decode(errors="replace") if n >= 0 else default

    @property
    def name(self) -> str:
        """As the file calls itself; the same as the gemma engine's for the same file."""
        return re.sub(r"\s+", "-", self.metadata("general.name", self.path.stem).strip()).lower()[:200]

    @property
    def context_length(self) -> int:
        """The longest text that the model was made for, in tokens."""
        architecture = self.metadata("general.architecture", "")
        return int(self.metadata(f"{architecture}.context_length", "0")) or 2**31 - 1

    @property
    def has_state(self) -> bool:
        """Whether it keeps a state that no token can be taken back from, in some of its layers at least."""
        return bool(llama.llama_model_is_recurrent(self.pointer) or llama.llama_model_is_hybrid(self.pointer))

    @property
    def bos(self) -> int | None:
        """The token for the beginning of a text, if the model wants one."""
        token = int(llama.llama_vocab_bos(self.vocab))
        return token if token != _NO_TOKEN and llama.llama_vocab_get_add_bos(self.vocab) else None

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """End of text, and end of turn if the vocabulary has one."""
        found = {int(llama.llama_vocab_eos(self.vocab)), int(llama.llama_vocab_eot(self.vocab))}
        return tuple(sorted(found - {_NO_TOKEN}))
