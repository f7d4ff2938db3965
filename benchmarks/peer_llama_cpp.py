"""Measures llama.cpp on a GGUF file through the low-level API of llama-cpp-python: one llama_decode a step."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
from workload import Speeds, Workload, serve


def measure(path: str, work: Workload) -> Speeds:
    """Prefill and decode speeds, after a short warm-up. Flash attention is on; the KV cache is llama.cpp's f16."""
    llama_cpp.llama_log_set(_silent, None)
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    if model is None:
        raise SystemExit(f"llama.cpp can't load {path}")
    long, short = work.prompts()

    context = _context(model, work, work.prompt + work.steps + 64, 1)
    _decode(context, long[::-1][:64], range(64), [0] * 64)
    llama_cpp.llama_free(context)

    context = _context(model, work, work.prompt + work.steps + 64, 1)
    prefill = _decode(context, long, range(work.prompt), [0] * work.prompt)
    decode = sum(_decode(context, [long[i]], [work.prompt + i], [0]) for i in range(work.steps))
    llama_cpp.llama_free(context)

    every = list(range(work.batch))
    context = _context(model, work, work.batch * (work.short_prompt + work.steps + 64), work.batch)
    for sequence in every:
        _decode(context, short[sequence], range(work.short_prompt), [sequence] * work.short_prompt)
    decode_batch = 0.0
    for i in range(work.steps):
        tokens = [short[s][i % work.short_prompt] for s in every]
        decode_batch += _decode(context, tokens, [work.short_prompt + i] * work.batch, every, all_logits=True)
    llama_cpp.llama_free(context)
    return Speeds(
        prefill=work.prompt / prefill,
        decode_1=work.steps / decode,
        decode_batch=work.batch * work.steps / decode_batch,
        engine=f"llama-cpp-python {llama_cpp.__version__}",
    )


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _silent(level: int, text: bytes, data: Any) -> None:
    """llama.cpp writes pages to stderr; what matters here are the figures."""


def _context(model: Any, work: Workload, tokens: int, sequences: int) -> Any:
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = tokens, 2048, 512, sequences
    params.n_threads = params.n_threads_batch = work.threads
    params.flash_attn_type = 1
    return llama_cpp.llama_init_from_model(model, params)


def _decode(context: Any, tokens: Any, positions: Any, sequences: Any, *, all_logits: bool = False) -> float:
    """Seconds of one llama_decode; logits of the last token, or of all."""
    count = len(tokens)
    batch = llama_cpp.llama_batch_init(count, 0, 1)
    batch.n_tokens = count
    for i, (token, position, sequence) in enumerate(zip(tokens, positions, sequences, strict=True)):
        batch.token[i], batch.pos[i] = token, position
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        batch.logits[i] = all_logits or i == count - 1
    start = time.perf_counter()
    status = llama_cpp.llama_decode(context, batch)
    llama_cpp.llama_synchronize(context)
    seconds = time.perf_counter() - start
    llama_cpp.llama_batch_free(batch)
    if status != 0:
        raise SystemExit(f"llama_decode failed with {status}")
    return seconds


if __name__ == "__main__":
    serve(measure)
