"""The layouts of ``layouts`` for numpy, where rows are read many at a time; a test holds the two together.

Single rows are packed with ``struct``, which takes a fifth of the time.
"""

from __future__ import annotations

import numpy as np

RECORD_DTYPE = np.dtype(
    [("request", "<u8"), ("n_rows", "<u4"), ("kind", "<u4"), ("waited", "<f4"), ("token", "<i4"), ("logprob", "<f4")]
)
RESULT_DTYPE = np.dtype([("token", "<i4"), ("logprob", "<f4")])
STEP_DTYPE = np.dtype(
    [
        ("slot", "<u4"),
        ("start", "<u4"),
        ("length", "<u4"),
        ("position", "<u4"),
        ("output_rows", "<u2"),
        ("sampled", "<u2"),
        ("sampling", "V20"),
        ("client", "<u8"),
        ("rows_offset", "<u8"),
    ]
)
LOGIT = np.dtype("<f4")
