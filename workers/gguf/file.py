"""Reading a GGUF file: its header, and dequantized rows of its tensors.

``gguf.GGUFReader`` makes several numpy objects for every string of the header, which takes 18 seconds for a vocabulary
of 262,144 pieces; this takes 0.2. Types, block sizes and dequantization are the ``gguf`` package's.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType
from gguf.quants import dequantize

from shmsched.errors import ShmschedError

Floats = npt.NDArray[np.float32]
Value = int | float | bool | str | list[bytes] | npt.NDArray[Any]

_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


class GgufError(ShmschedError, ValueError):
    """A GGUF file that is missing, damaged, or not of the kind that is wanted."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies. ``shape`` is numpy's order: the last axis is contiguous and quantized in blocks."""

    name: str
    shape: tuple[int, ...]
    quantization: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def n_rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))

    @property
    def n_bytes(self) -> int:
        return self.n_rows * self.row_bytes


class GgufFile:
    """One GGUF file, mapped. ``metadata`` holds its key-value pairs, ``tensors`` its tensors by name."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise GgufError(f"there is no GGUF file {self.path}") from None
        except (OSError, ValueError) as error:
            raise GgufError(f"cannot read the GGUF file {self.path}: {error}") from error
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_header(_Cursor(self._map))
        except (struct.error, UnicodeDecodeError, ValueError, KeyError) as error:
            raise GgufError(f"{self.path} is not a whole GGUF file: {error}") from error

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self._number(key, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default))

    def text(self, key: str, default: str | None = None) -> str:
        value = self.metadata.get(key, default)
        if not isinstance(value, str):
            raise GgufError(f"{self.path}: {key} is {_shown(value)}; a string is wanted")
        return value

    def strings(self, key: str) -> list[bytes]:
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise GgufError(f"{self.path}: {key} is {_shown(value)}; an array of strings is wanted")
        return value

    def array(self, key: str) -> npt.NDArray[Any]:
        value = self.metadata.get(key)
        if not isinstance(value, np.ndarray):
            raise GgufError(f"{self.path}: {key} is {_shown(value)}; an array of numbers is wanted")
        return value

    def tensor(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise GgufError(f"{self.path} has no tensor {name}")
        return self.tensors[name]

    def rows(self, name: str, which: slice | npt.NDArray[np.integer[Any]]) -> Floats:
        """Those rows of a tensor, dequantized: float32 (n, columns)."""
        info = self.tensor(name)
        quantized = np.frombuffer(self._map, np.uint8, info.n_bytes, info.offset).reshape(info.n_rows, info.row_bytes)
        try:
            return np.asarray(dequantize(np.ascontiguousarray(quantized[which]), info.quantization), np.float32)
        except NotImplementedError as error:
            raise GgufError(f"{self.path}: tensor {name}: {error}") from error

    def _number(self, key: str, default: float | None) -> int | float:
        value = self.metadata.get(key, default)
        if not isinstance(value, int | float):
            raise GgufError(f"{self.path}: {key} is {_shown(value)}; a number is wanted")
        return value

    def _read_header(self, cursor: _Cursor) -> None:
        magic = cursor.take(4)
        if magic != b"GGUF":
            raise ValueError(f"it begins with {magic!r}")
        version, n_tensors, n_values = cursor.unpack("IQQ")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}; 2 and 3 are known")
        for _ in range(n_values):
            key = cursor.string().decode()
            self.metadata[key] = _read_value(cursor)
        infos = [_read_tensor_info(cursor) for _ in range(n_tensors)]
        alignment = self.integer("general.alignment", 32)
        if alignment <= 0:
            raise ValueError(f"general.alignment is {alignment}")
        data = -(-cursor.position // alignment) * alignment
        for name, shape, quantization, offset in infos:
            block_size, block_bytes = GGML_QUANT_SIZES[quantization]
            if shape[-1] % block_size:
                raise ValueError(
                    f"rows of tensor {name} have {shape[-1]} values; {quantization.name} has blocks of {block_size}"
                )
            info = TensorInfo(name, shape, quantization, data + offset, shape[-1] // block_size * block_bytes)
            if info.offset + info.n_bytes > len(self._map):
                raise ValueError(
                    f"tensor {name} ends at byte {info.offset + info.n_bytes}, the file at {len(self._map)}"
                )
            self.tensors[name] = info


class _Cursor:
    def __init__(self, buffer: mmap.mmap) -> None:
        self.buffer = buffer
        self.position = 0

    def take(self, n_bytes: int) -> bytes:
        start, self.position = self.position, self.position + n_bytes
        if self.position > len(self.buffer):
            raise ValueError(f"it ends at byte {len(self.buffer)}, within its header")
        return self.buffer[start : self.position]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack("<" + layout, self.take(struct.calcsize("<" + layout)))

    def string(self) -> bytes:
        (n_bytes,) = self.unpack("Q")
        return self.take(n_bytes)

    def strings(self, count: int) -> list[bytes]:
        """Many strings: the long part of a header, so without a call for each."""
        buffer, position, end, unpack = self.buffer, self.position, len(self.buffer), struct.Struct("<Q").unpack_from
        found = []
        for _ in range(count):
            start = position + 8
            position = start + unpack(buffer, position)[0]
            if position > end:
                raise ValueError(f"it ends at byte {end}, within its header")
            found.append(buffer[start:position])
        self.position = position
        return found


def _read_value(cursor: _Cursor) -> Value:
    kind = GGUFValueType(cursor.unpack("I")[0])
    if kind == GGUFValueType.STRING:
        return cursor.string().decode()
    if kind != GGUFValueType.ARRAY:
        value: int | float | bool = cursor.unpack(_SCALARS[kind])[0]
        return value
    raw_kind, count = cursor.unpack("IQ")
    kind = GGUFValueType(raw_kind)
    if kind == GGUFValueType.STRING:
        return cursor.strings(count)
    dtype = np.dtype("<" + _SCALARS[kind])
    return np.frombuffer(cursor.take(count * dtype.itemsize), dtype)


def _read_tensor_info(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = cursor.string().decode()
    (n_axes,) = cursor.unpack("I")
    if not 1 <= n_axes <= 4:
        raise ValueError(f"tensor {name} has {n_axes} axes")
    axes = cursor.unpack(f"{n_axes}Q")
    quantization, offset = cursor.unpack("IQ")
    return name, tuple(reversed(axes)), GGMLQuantizationType(quantization), offset


def _shown(value: object) -> str:
    return (
        "missing"
        if value is None
        else f"a {type(value).__name__}"
        if isinstance(value, list | np.ndarray)
        else repr(value)
    )
