"""The weights as the forward pass wants them: float32, dequantized once, in a file that all engines map.

float32, because BLAS has no kernel for anything narrower that numpy can call: half-precision weights would be widened
on every pass.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from shmsched.workers.gemma.config import GemmaConfig
from shmsched.workers.gemma.files import checksum, replacing
from shmsched.workers.gguf.file import GgufError, GgufFile

Floats = npt.NDArray[np.float32]

FORMAT = 1
"""Changes with the layout below, and old caches with it."""

_HEADER_BYTES = 4096
_ALIGNMENT = 64
_CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Entry:
    """One array of the file: ``sources`` put below one another, then transposed if ``wide``."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    wide: bool
    offset: int

    @property
    def n_bytes(self) -> int:
        return 4 * int(np.prod(self.shape, dtype=np.int64))


def layout(file: GgufFile, config: GemmaConfig) -> list[Entry]:
    """What the cache file holds and where. Weights that widen lie as (in, out), others as (out, in): see ``linear``."""
    c = config
    heads, kv = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim
    entries: list[Entry] = []
    offset = _HEADER_BYTES

    def add(name: str, rows: dict[str, int], columns: int | None, wide: bool = False) -> None:
        nonlocal offset
        for source, n_rows in rows.items():
            wanted = (n_rows,) if columns is None else (n_rows, columns)
            if file.tensor(source).shape != wanted:
                raise GgufError(
                    f"{file.path}: tensor {source} has shape {file.tensor(source).shape}; the header says {wanted}"
                )
        total = sum(rows.values())
        shape = (total,) if columns is None else (columns, total) if wide else (total, columns)
        entries.append(Entry(name, tuple(rows), shape, wide, offset))
        offset += -(-entries[-1].n_bytes // _ALIGNMENT) * _ALIGNMENT

    for layer in range(c.n_layers):
        b = f"blk.{layer}"
        for norm, size in (
            ("attn_norm", c.dim),
            ("attn_q_norm", c.head_dim),
            ("attn_k_norm", c.head_dim),
            ("post_attention_norm", c.dim),
            ("ffn_norm", c.dim),
            ("post_ffw_norm", c.dim),
        ):
            add(f"{b}.{norm}", {f"{b}.{norm}.weight": size}, None)
        add(f"{b}.qkv", {f"{b}.attn_q.weight": heads, f"{b}.attn_k.weight": kv, f"{b}.attn_v.weight": kv}, c.dim)
        add(f"{b}.attn_output", {f"{b}.attn_output.weight": c.dim}, heads)
        add(f"{b}.gate_up", {f"{b}.ffn_gate.weight": c.ffn_dim, f"{b}.ffn_up.weight": c.ffn_dim}, c.dim, wide=True)
        add(f"{b}.ffn_down", {f"{b}.ffn_down.weight": c.dim}, c.ffn_dim)
    add("output_norm", {"output_norm.weight": c.dim}, None)
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    add("output", {head: c.vocab_size}, c.dim, wide=True)
    return entries


def load_weights(file: GgufFile, config: GemmaConfig, directory: Path) -> dict[str, Floats]:
    """The arrays of :func:`layout` by name, read-only, shared between processes; made in ``directory`` if not there."""
    entries = layout(file, config)
    digest = checksum(file.path, directory)
    target = directory / f"gemma-{digest[:16]}-v{FORMAT}.f32"
    mapped = _mapped(target, entries)
    if mapped is None:
        _build(target, file, entries)
        mapped = _mapped(target, entries)
    if mapped is None:
        raise GgufError(f"{target} was changed while it was made; remove it and start again")
    return {e.name: np.frombuffer(mapped, np.float32, e.n_bytes // 4, e.offset).reshape(e.shape) for e in entries}


def _mapped(target: Path, entries: list[Entry]) -> mmap.mmap | None:
    """The file, if it is whole: of the right length, and not written to since the time that its header states."""
    try:
        with target.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size != _file_bytes(entries):
                return None
            if json.loads(file.read(_HEADER_BYTES)) != _header(status.st_mtime_ns):
                return None
            # Read ahead in one go: page by page, the first forward passes would wait for the disk.
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ)
    except (OSError, ValueError):
        return None


def _build(target: Path, file: GgufFile, entries: list[Entry]) -> None:
    size = _file_bytes(entries)
    written_ns = int(time.time()) * 10**9  # whole seconds, which every file system keeps and no write by chance has
    with (
        replacing(target, wanted=lambda: _mapped(target, entries) is None) as temporary,
        temporary.open("r+b") as output,
        _progress(f"dequantizing {file.path.name}", sum(entry.n_bytes for entry in entries)) as advance,
    ):
        os.posix_fallocate(output.fileno(), 0, size)
        output.write(json.dumps(_header(written_ns)).encode().ljust(_HEADER_BYTES))
        output.flush()
        view = mmap.mmap(output.fileno(), size)
        for entry in entries:
            out = np.frombuffer(view, np.float32, entry.n_bytes // 4, entry.offset).reshape(entry.shape)
            for at, rows in _source_rows(file, entry):
                if entry.wide:
                    out[:, at : at + len(rows)] = rows.T
                else:
                    out.reshape(-1, rows.shape[1])[at : at + len(rows)] = rows
                advance(rows.nbytes)
        view.flush()
        os.utime(temporary, ns=(written_ns, written_ns))


def _source_rows(file: GgufFile, entry: Entry) -> Iterator[tuple[int, Floats]]:
    at = 0
    for source in entry.sources:
        info = file.tensor(source)
        step = max(1, _CHUNK_BYTES // (4 * info.shape[-1]))
        for start in range(0, info.n_rows, step):
            rows = file.rows(source, slice(start, start + step))
            yield at, rows
            at += len(rows)


def _header(written_ns: int) -> dict[str, int]:
    return {"written_ns": written_ns}


def _file_bytes(entries: list[Entry]) -> int:
    return entries[-1].offset + entries[-1].n_bytes


@contextmanager
def _progress(what: str, n_bytes: int) -> Iterator[Callable[[int], None]]:
    # On standard error: standard output is for what a program says.
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(what, total=n_bytes)
        yield lambda n: bar.advance(task, n)
