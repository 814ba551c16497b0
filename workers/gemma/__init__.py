"""Gemma 3 in numpy, read from GGUF: the engine is in ``engine``, one forward pass in ``model``."""

from shmsched.workers.gemma.engine import Gemma

__all__ = ["Gemma"]
