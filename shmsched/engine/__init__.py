"""Engines: the contract, and the process that hosts one."""

from shmsched.engine.batch_view import BatchView, StepRow
from shmsched.engine.contract import Engine, EngineInfo, Limits
from shmsched.engine.host import serve

__all__ = ["BatchView", "Engine", "EngineInfo", "Limits", "StepRow", "serve"]
