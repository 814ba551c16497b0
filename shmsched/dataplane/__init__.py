"""A step's way: plain typed Python, which Cython compiles where there is a C compiler, and which runs as it stands elsewhere.

``BUILD`` says which of the two runs: "compiled" or "interpreted". With ``SHMSCHED_INTERPRETED=1`` it is the second in any case.
"""

from __future__ import annotations

import os
import warnings

from shmsched.dataplane import extensions

BUILD = "interpreted"

if os.environ.get("SHMSCHED_INTERPRETED", "0") in ("", "0"):
    _state = extensions.state()
    if _state is extensions.State.FRESH:
        # In front of the sources, so that each module's extension is found before its source. Nothing shadows a source otherwise.
        __path__.insert(0, str(extensions.FOLDER))
        BUILD = "compiled"
    elif _state is extensions.State.STALE:
        warnings.warn(
            f"the extensions in {extensions.FOLDER} are {_state.value}, and are ignored: shmsched runs interpreted."
            " `make build` in the checkout builds them anew, or `pip install -e .` does",
            RuntimeWarning,
            stacklevel=2,
        )
