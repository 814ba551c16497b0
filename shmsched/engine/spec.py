"""Naming an engine: ``name[:argument][?key=value&...]``, ``package.module:Class[...]`` or ``file.py:Class[...]``."""

from __future__ import annotations

import importlib
import inspect
import os
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from shmsched.engine import files
from shmsched.engine.contract import Engine
from shmsched.engine.stop_requests import INTERRUPTS
from shmsched.engine.traces import in_one_line
from shmsched.errors import EngineSpecError

GROUP = "shmsched.engines"


class EngineImportError(EngineSpecError):
    """The engine's module raised, as ``__cause__`` says, when it was imported."""


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine's constructor, and what to call it with."""

    name: str
    argument: str | None
    options: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> EngineSpec:
        head, _, query = text.partition("?")
        name, colon, argument = head.partition(":")
        if not name:
            raise EngineSpecError(f"engine {text!r} has no name; it is written name[:argument][?key=value&...]")
        try:
            options = tuple(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        except ValueError as e:
            raise EngineSpecError(f"engine {text!r}: the part after '?' must be key=value&key=value ({e})") from e
        repeated = {k for k, _ in options if [n for n, _ in options].count(k) > 1}
        if repeated:
            raise EngineSpecError(f"engine {text!r}: option {min(repeated)!r} is given more than once")
        return cls(name, argument if colon else None, options)

    def load(self) -> Callable[[], Engine]:
        """Import the engine's class and check the options against its constructor. Raises EngineSpecError."""
        engine_class, argument = self._resolve()
        positional = [] if argument is None else [argument]
        try:
            bound = inspect.signature(engine_class).bind(*positional, **dict(self.options))
        except TypeError as e:
            takes = ", ".join(inspect.signature(engine_class).parameters) or "no options"
            raise EngineSpecError(f"engine {self.name!r}: {e}; it takes {takes}") from e
        try:
            hints = typing.get_type_hints(engine_class.__init__)
        except Exception as e:
            raise EngineSpecError(
                f"engine {self.name!r}: the annotations of its constructor cannot be resolved: {e}"
            ) from e
        for key, value in bound.arguments.items():
            hint = hints.get(key, str)
            if isinstance(value, dict):  # **options
                bound.arguments[key] = {k: _coerce(self.name, k, v, hint) for k, v in value.items()}
            elif isinstance(value, tuple):  # *arguments
                bound.arguments[key] = tuple(_coerce(self.name, key, v, hint) for v in value)
            else:
                bound.arguments[key] = _coerce(self.name, key, value, hint)
        return lambda: engine_class(*bound.args, **bound.kwargs)

    def _resolve(self) -> tuple[type[Engine], str | None]:
        for entry in entry_points(group=GROUP, name=self.name):
            try:
                return _engine_class(self.name, entry.load()), self.argument
            except ImportError as e:
                raise EngineSpecError(
                    f"engine {self.name!r} cannot be imported: {_with_extra(e, entry.value, self.name)}"
                ) from e
        if self.argument is None:
            known = ", ".join(sorted({e.name for e in entry_points(group=GROUP)})) or "none"
            raise EngineSpecError(
                f"no engine is named {self.name!r}. Known: {known}; or write package.module:Class or file.py:Class"
            )
        class_name, colon, argument = self.argument.partition(":")
        module = _import(self.name)
        found = getattr(module, class_name, None)
        if found is None:
            raise EngineSpecError(f"{self.name} has no {class_name!r}; the engine is written {self.name}:Class")
        return _engine_class(f"{self.name}:{class_name}", found), argument if colon else None


def _with_extra(error: ImportError, module: str, name: str) -> str:
    """What is missing, and what to install where it is one of our own engines."""
    if not module.startswith("shmsched.workers.") or "pip install" in str(error):
        return str(error)
    return f"{error}. It comes with `pip install 'shmsched[{name}]'`"


def _import(name: str) -> types.ModuleType:
    path = Path(name) if name.endswith(".py") else None
    try:
        if path is not None:
            if not path.is_file():
                raise EngineSpecError(f"engine file {path.resolve()} does not exist")
            files.importable_beside(path)
        files.importable(os.getcwd())
        return files.load(path) if path is not None else importlib.import_module(name)
    except (EngineSpecError, *INTERRUPTS):
        raise
    except BaseException as e:
        # Whatever the module does at import is its author's; what we owe is which engine it was, and where it went wrong.
        raise EngineImportError(f"engine module {name!r} cannot be imported: {in_one_line(e)}") from e


def _engine_class(name: str, found: Any) -> type[Engine]:
    if not (isinstance(found, type) and issubclass(found, Engine)):
        raise EngineSpecError(f"{name} is {found!r}, not a subclass of shmsched.engine.Engine")
    return found


_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}


def _coerce(engine: str, key: str, value: str, hint: Any) -> Any:
    """``value`` as the type that the constructor asks for."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    wanted = [h for h in typing.get_args(hint) if h is not type(None)] if union else [hint]
    for kind in wanted:
        try:
            if kind is bool:
                return _WORDS[value.lower()]
            if kind in (int, float, str, Path):
                return kind(value)
        except (ValueError, KeyError):
            continue
    names = " or ".join(getattr(k, "__name__", str(k)) for k in wanted)
    raise EngineSpecError(f"engine {engine!r}: option {key} is {value!r}; it must be {names}")
