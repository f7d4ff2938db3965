"""Measures ik_llama.cpp on a GGUF file as llama_cpp.py measures llama.cpp, through the bindings of ik-llama-cpp-python.

Its weights are repacked for the processor when they are loaded (its ``-rtr``), which is not its default and is faster.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import ik_llama_cpp
from ik_llama_cpp import _ctypes_api as api
from ik_llama_cpp._lib_loader import load_shared_library

from peers.workers import llama_cpp as shared
from peers.workload import serve

LIBRARY = load_shared_library()
"""The library itself, for the functions of sequences that the bindings lack."""
for name in ("get_size", "get_data", "set_data"):
    getattr(LIBRARY, f"llama_state_seq_{name}").restype = ctypes.c_size_t


def pointer(context: Any) -> ctypes.c_void_p:
    """A context as those functions take it."""
    return ctypes.c_void_p(context)


class _Bindings:
    """The functions that the shared code calls, by llama-cpp-python's names."""

    def __getattr__(self, name: str) -> Any:
        return getattr(api, name)

    def llama_log_set(self, callback: Any, data: Any) -> None:
        """Does nothing: these bindings lack the function. Logs go to stderr, which the caller drops."""

    def llama_synchronize(self, context: Any) -> None:
        """A decode on a processor has ended when it returns."""

    def llama_model_default_params(self) -> Any:
        """Gives its defaults, repacked."""
        params = api.llama_model_default_params()
        params.repack_tensors, params.use_mmap = True, False
        return params

    def llama_init_from_model(self, model: Any, params: Any) -> Any:
        """Takes flash attention for one request: with several of Gemma 3's it fails its own check (S > 0)."""
        params.flash_attn = params.n_seq_max == 1 or params.kv_unified
        return api.llama_init_from_model(model, params)

    def llama_get_logits(self, context: Any) -> Any:
        """Gives those of the first row, behind which the others lie."""
        return api.llama_get_logits_ith(context, 0)

    def llama_get_memory(self, context: Any) -> Any:
        """Gives the context, which has the cache."""
        return context

    def llama_memory_seq_rm(self, context: Any, sequence: int, first: int, last: int) -> Any:
        """Forgets a range of a sequence."""
        return LIBRARY.llama_kv_cache_seq_rm(pointer(context), sequence, first, last)

    def llama_memory_seq_add(self, context: Any, sequence: int, first: int, last: int, moved: int) -> None:
        """Moves a range of a sequence."""
        LIBRARY.llama_kv_cache_seq_add(pointer(context), sequence, first, last, moved)

    def llama_memory_seq_cp(self, context: Any, source: int, target: int, first: int, last: int) -> None:
        """Makes a range of a sequence another's too."""
        LIBRARY.llama_kv_cache_seq_cp(pointer(context), source, target, first, last)

    def llama_memory_seq_pos_max(self, context: Any, sequence: int) -> int:
        """Gives the position of the last token of a sequence."""
        return int(LIBRARY.llama_kv_cache_seq_pos_max(pointer(context), sequence))

    def llama_state_seq_get_size(self, context: Any, sequence: int) -> int:
        """Gives the bytes of what a sequence has."""
        return int(LIBRARY.llama_state_seq_get_size(pointer(context), sequence, 0))

    def llama_state_seq_get_data(self, context: Any, target: Any, size: int, sequence: int) -> int:
        """Copies what a sequence has."""
        return int(LIBRARY.llama_state_seq_get_data(pointer(context), target, ctypes.c_size_t(size), sequence, 0))

    def llama_state_seq_set_data(self, context: Any, source: Any, size: int, sequence: int) -> int:
        """Makes it another's."""
        return int(LIBRARY.llama_state_seq_set_data(pointer(context), source, ctypes.c_size_t(size), sequence, 0))


shared.llama_cpp = _Bindings()
shared.ENGINE = f"ik-llama-cpp-python {ik_llama_cpp.__version__}"
shared.SETTINGS = "flash attention for one request, KV cache f16, ubatch 512, repacked"
speed, long, far, start, logits = shared.speed, shared.long, shared.far, shared.start, shared.logits

if __name__ == "__main__":
    serve(sys.modules[__name__])
