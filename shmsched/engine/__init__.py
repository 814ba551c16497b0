"""Engines: the contract, and the process that hosts one."""

from typing import TYPE_CHECKING

from shmsched.lazy_names import names_from

if TYPE_CHECKING:
    from shmsched.engine.batch_view import BatchView, StepRow
    from shmsched.engine.contract import Engine, EngineInfo, Limits
    from shmsched.engine.host import serve

__all__ = ["BatchView", "Engine", "EngineInfo", "Limits", "StepRow", "serve"]

__getattr__, __dir__ = names_from(
    __name__,
    {
        "shmsched.engine.batch_view": ("BatchView", "StepRow"),
        "shmsched.engine.contract": ("Engine", "EngineInfo", "Limits"),
        "shmsched.engine.host": ("serve",),
    },
)
