"""Matrix products for a few rows against large weights, which is what decoding is.

With one row a product costs the reading of the weights. With more, BLAS first copies the weights into its own order,
which for few rows costs more than the product. Measured with OpenBLAS on two cores, for the output head (671 MB):
1 row 21 ms; 2 rows 50 ms, but 31 ms one row after the other while a slice of the weights is in the cache; 6 rows 80 ms,
but 8 rows 45 ms, as its kernels take 8 at a time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

_KERNEL_ROWS = 8
_SLICE_COLUMNS = 8192


def padded(n_rows: int) -> int:
    """The number of rows that a product of ``n_rows`` is computed with."""
    if n_rows < 4 or n_rows > 4 * _KERNEL_ROWS:
        return n_rows
    return -(-n_rows // _KERNEL_ROWS) * _KERNEL_ROWS


def widen(x: Floats, weights: Floats, out: Floats | None = None) -> Floats:
    """``x @ weights`` for weights of (in, out), the faster order where out is larger: (n, out).

    ``out`` has room for ``padded(n)`` rows; the first n are the result.
    """
    n, rows = len(x), padded(len(x))
    if out is None:
        out = np.empty((rows, weights.shape[1]), np.float32)
    if 1 < n < 4:
        for start in range(0, weights.shape[1], _SLICE_COLUMNS):
            columns = slice(start, start + _SLICE_COLUMNS)
            for row in range(n):
                np.matmul(x[row], weights[:, columns], out=out[row, columns])
    else:
        np.matmul(_with_rows(x, rows), weights, out=out[:rows])
    return out[:n]


def narrow(x: Floats, weights: Floats) -> Floats:
    """``x @ weights.T`` for weights of (out, in), the faster order where out is not larger: (n, out)."""
    n, rows = len(x), padded(len(x))
    if n < 4:
        out = np.empty((n, len(weights)), np.float32)
        for row in range(n):
            np.matmul(weights, x[row], out=out[row])
        return out
    if rows <= 4 * _KERNEL_ROWS:
        return np.ascontiguousarray((weights @ _with_rows(x, rows).T).T[:n])
    return x @ weights.T


def _with_rows(x: Floats, n_rows: int) -> Floats:
    if len(x) == n_rows:
        return x
    y = np.zeros((n_rows, x.shape[1]), np.float32)
    y[: len(x)] = x
    return y
