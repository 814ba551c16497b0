"""One llama.cpp context: the memory of all sessions, and the one call that runs a batch."""

from __future__ import annotations

import ctypes

import numpy as np
import numpy.typing as npt

from shmsched.errors import EngineError, EngineStartError
from shmsched.workers.llama_cpp.library import Model, llama

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.integer]

_NO_ROOM = 1  # what llama_decode returns when its memory is full; nothing was taken then
_TO_THE_END = -1


class Context:
    """Sequences are numbered from 0 to ``n_sequences - 1`` and share ``n_ctx`` cells, one for each token held.

    Each may have a twin, which holds the same cells. With sliding-window attention llama.cpp uses a cell again once its
    only sequence has moved on by a window, and a sequence that is rewound would miss it without a word: a cell that
    belongs to two sequences stays.
    """

    def __init__(self, model: Model, *, n_ctx: int, n_sequences: int, batch_tokens: int, threads: int) -> None:
        self._vocab_size = model.vocab_size
        self._n = 2 if llama.llama_model_n_swa(model.pointer) > 0 else 1
        self._n_sequences = n_sequences
        if self._n * n_sequences > (most := llama.llama_max_parallel_sequences()):
            raise EngineStartError(
                f"llama_cpp: max_sessions is {n_sequences}; llama.cpp holds at most {most // self._n} of this model's"
            )
        params = llama.llama_context_default_params()
        params.n_ctx = n_ctx
        params.n_seq_max = self._n * n_sequences
        # A whole batch in one pass, in which every token may be an output.
        params.n_batch = params.n_ubatch = batch_tokens
        params.n_outputs_max = params.n_outputs_max_per_seq = 0
        params.n_threads = params.n_threads_batch = threads
        # One pool of cells: a session may be long while others are short, and a fork shares its parent's cells.
        params.kv_unified = True
        params.swa_full = True
        self._pointer = llama.llama_init_from_model(model.pointer, params)
        if not self._pointer:
            raise EngineStartError(
                f"llama.cpp cannot make a context of n_ctx={n_ctx} tokens for {model.path}; the lines above say why, "
                "and a smaller n_ctx needs less memory"
            )
        self.n_ctx = int(llama.llama_n_ctx(self._pointer))
        self._memory = llama.llama_get_memory(self._pointer)
        if not self._memory:
            raise EngineStartError(f"{model.path} holds a model without memory (an encoder?); it cannot generate")
        self._batch = _Batch(batch_tokens, self._n)

    def close(self) -> None:
        if self._pointer:
            llama.llama_free(self._pointer)
            self._pointer = None

    def decode(self, tokens: Ints, positions: Ints, sequences: Ints, outputs: Ints) -> bool:
        """Append ``tokens`` at ``positions`` to ``sequences``, in one ``llama_decode``. False if there is no room: nothing was
        taken then. Raises EngineError if llama.cpp fails; the sequences of this call are in disorder then."""
        twins = (sequences,) if self._n == 1 else (sequences, sequences + self._n_sequences)
        status = llama.llama_decode(self._pointer, self._batch.filled(tokens, positions, twins, outputs))
        if status not in (0, _NO_ROOM):
            raise EngineError(f"llama_decode returned {status} for a batch of {len(tokens)} tokens")
        return bool(status == 0)

    def logits(self, n: int) -> Floats:
        """The logits of the last batch's ``n`` outputs, in their order: (n, vocab), in llama.cpp's own buffer until the next
        ``decode``."""
        return np.ctypeslib.as_array(llama.llama_get_logits(self._pointer), (n, self._vocab_size))

    def truncate(self, sequence: int, length: int) -> bool:
        """Forget what the sequence holds beyond ``length`` tokens. False, and nothing forgotten, if this kind of memory
        cannot (a recurrent state has no way back)."""
        # Asked for as a whole, for which every kind of memory has a way.
        start = length or -1
        return all(llama.llama_memory_seq_rm(self._memory, s, start, _TO_THE_END) for s in self._twins(sequence))

    def copy(self, parent: int, sequence: int, length: int) -> bool:
        """Let an empty sequence hold the first ``length`` tokens of ``parent``. False, and nothing copied, if it cannot."""
        for source, target in zip(self._twins(parent), self._twins(sequence), strict=True):
            llama.llama_memory_seq_cp(self._memory, source, target, 0, length)
        # A recurrent state is copied whole, and may be that of more tokens.
        if self.truncate(sequence, length):
            return True
        self.truncate(sequence, 0)
        return False

    def _twins(self, sequence: int) -> range:
        return range(sequence, self._n * self._n_sequences, self._n_sequences)


class _Batch:
    """A ``llama_batch`` over arrays of our own, so that filling it takes no call for each token."""

    def __init__(self, n_tokens: int, n_sequences_each: int) -> None:
        self._sequences = np.zeros((n_tokens, n_sequences_each), np.int32)
        row = self._sequences.strides[0]
        self._sequence_pointers = np.arange(n_tokens, dtype=np.uintp) * row + self._sequences.ctypes.data
        self._counts = np.full(n_tokens, n_sequences_each, np.int32)
        self._wanted = np.zeros(n_tokens, np.int8)
        fields = dict(llama.llama_batch._fields_)
        self._batch = llama.llama_batch()
        self._batch.n_seq_id = _pointer(self._counts, fields["n_seq_id"])
        self._batch.seq_id = _pointer(self._sequence_pointers, fields["seq_id"])
        self._batch.logits = _pointer(self._wanted, fields["logits"])
        self._fields = fields

    def filled(self, tokens: Ints, positions: Ints, twins: tuple[Ints, ...], outputs: Ints) -> ctypes.Structure:
        """Valid until the next call, and as long as ``tokens`` and ``positions`` live."""
        n = len(tokens)
        self._tokens = np.ascontiguousarray(tokens, np.int32)
        self._positions = np.ascontiguousarray(positions, np.int32)
        for column, sequences in enumerate(twins):
            self._sequences[:n, column] = sequences
        self._wanted[:n] = 0
        self._wanted[outputs] = 1
        self._batch.n_tokens = n
        self._batch.token = _pointer(self._tokens, self._fields["token"])
        self._batch.pos = _pointer(self._positions, self._fields["pos"])
        batch: ctypes.Structure = self._batch
        return batch


def _pointer(array: Ints, kind: type) -> object:
    return ctypes.cast(array.ctypes.data, kind)
