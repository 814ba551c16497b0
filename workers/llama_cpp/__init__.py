"""llama.cpp through llama-cpp-python's low-level functions: the engine is in ``engine``, the calls in ``context``."""

from shmsched.workers.llama_cpp.engine import LlamaCpp

__all__ = ["LlamaCpp"]
