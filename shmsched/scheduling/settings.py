"""A daemon's settings that are numbers, and what each may be: for ``launch``, ``shmsched up``, its file, and the daemon itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shmsched.arguments import LONGEST_S, number, whole
from shmsched.errors import InvalidRequest
from shmsched.scheduling.params import INT32_MAX, SchedulerParams


class Setting(NamedTuple):
    check: Callable[[str, object, int, int], float] | Callable[[str, object, float, float], float]
    least: float
    most: float


_LIMITS = {name: Setting(whole, 1, INT32_MAX) for name in ("max_decode_sequences", "max_prefill_chunk_size")}
SETTINGS = _LIMITS | {
    "max_queued_steps": Setting(whole, 1, 2**63 - 1),
    "max_clients": Setting(whole, 1, 2**63 - 1),
    "max_shared_memory": Setting(whole, 1, 2**63 - 1),
    "drain_timeout_s": Setting(number, 0, LONGEST_S),
    "start_timeout_s": Setting(number, 0.001, LONGEST_S),
    "step_timeout_s": Setting(number, 0.001, LONGEST_S),
    "linger_share": Setting(number, 0, LONGEST_S),
    "ahead_share": Setting(number, 0, LONGEST_S),
}


def check(name: str, value: object, called: str = "") -> float:
    """What setting ``name`` is to be. Raises InvalidRequest, which names it as ``called``."""
    if name not in SETTINGS:
        raise InvalidRequest(f"no setting is called {name}; there are {', '.join(SETTINGS)}")
    setting = SETTINGS[name]
    return setting.check(called or name, value, setting.least, setting.most)  # type: ignore[arg-type]


def checked(settings: Mapping[str, object]) -> tuple[SchedulerParams, dict[str, Any]]:
    """The limits of a batch, and all others. Raises InvalidRequest for what none of them can be, or no two together."""
    values: dict[str, Any] = {name: check(name, value) for name, value in settings.items()}
    limits = {name: values.pop(name) for name in _LIMITS if name in values}
    return SchedulerParams(**limits), values
