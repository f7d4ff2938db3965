"""Measures ik_llama.cpp on a GGUF file as llama_cpp.py measures llama.cpp, through the bindings of ik-llama-cpp-python.

Its weights are repacked for the processor when they are loaded (its ``-rtr``), which is not its default and is faster.
"""

from __future__ import annotations

import sys
from typing import Any

import ik_llama_cpp
from ik_llama_cpp import _ctypes_api as api

from peers.workers import llama_cpp as shared
from peers.workload import serve


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
        params.flash_attn = params.n_seq_max == 1
        return api.llama_init_from_model(model, params)

    def llama_get_logits(self, context: Any) -> Any:
        """Gives those of the first row, behind which the others lie."""
        return api.llama_get_logits_ith(context, 0)


shared.llama_cpp = _Bindings()
shared.ENGINE = f"ik-llama-cpp-python {ik_llama_cpp.__version__}"
shared.SETTINGS = "flash attention for one request, KV cache f16, ubatch 512, repacked"
speed, long, start, logits = shared.speed, shared.long, shared.start, shared.logits

if __name__ == "__main__":
    serve(sys.modules[__name__])
