"""Runs llama-cpp-python on GGUF files, one line of JSON in and one out for each request.

A request for logits has "path", "ids" and "out", the file for them; one for the vector or scores of a text also has
"pooling". A request for tokens has "path" and "texts". The process is apart from the tests': llama.cpp aborts on keys
and texts that it finds impossible.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt


def logits_of(path: str, ids: list[int], pooling: int | None = None) -> npt.NDArray[np.float32]:
    """The logits [S, V] with keys, values and arithmetic in float32. Raises ValueError if the file isn't loaded.

    With ``pooling``, llama.cpp's number of one, or -1 for that of the file, the vector [E] or the scores of the text.
    """
    options = llama_cpp.llama_model_default_params()
    options.n_gpu_layers = 0
    options.use_mmap = False
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise ValueError("not loaded")
    settings = llama_cpp.llama_context_default_params()
    settings.n_ctx = settings.n_batch = settings.n_ubatch = 64
    settings.n_threads = settings.n_threads_batch = 1
    settings.type_k = settings.type_v = 0  # GGML_TYPE_F32
    settings.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
    if pooling is not None:
        settings.embeddings, settings.pooling_type = True, pooling
    context = llama_cpp.llama_init_from_model(model, settings)
    if not context:
        llama_cpp.llama_model_free(model)
        raise ValueError("no context")
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = token, i, 1, 0, 1
    try:
        if llama_cpp.llama_decode(context, batch):
            raise ValueError("not decoded")
        if pooling is not None:
            rank = llama_cpp.llama_pooling_type(context) == 4  # LLAMA_POOLING_TYPE_RANK
            size = llama_cpp.llama_model_n_cls_out(model) if rank else llama_cpp.llama_model_n_embd(model)
            pointer = llama_cpp.llama_get_embeddings_seq(context, 0)
            if not pointer:
                raise ValueError("no vector")
            return np.ctypeslib.as_array(pointer, (size,)).copy()
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        pointer = llama_cpp.llama_get_logits(context)
        return np.ctypeslib.as_array(pointer, (len(ids), size)).copy()
    finally:
        llama_cpp.llama_batch_free(batch)
        llama_cpp.llama_free(context)
        llama_cpp.llama_model_free(model)


def tokens_of(path: str, texts: list[str]) -> dict[str, Any]:
    """The tokens of each text, and those that end an answer. Raises ValueError if the vocabulary isn't loaded.

    Returns:
        "tokens": lists of ids, where control tokens in a text become such.
        "around": the same with the tokens that are added before and after a text.
        "plain": the same as "tokens" with control tokens as text.
        "texts": the text of each list of "tokens", without control tokens.
        "ends": the ids that end an answer.
    """
    options = llama_cpp.llama_model_default_params()
    options.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(path.encode(), options)
    if not model:
        raise ValueError("not loaded")
    vocabulary = llama_cpp.llama_model_get_vocab(model)
    try:
        tokens = [_tokenize(vocabulary, text, special=True) for text in texts]
        return {
            "tokens": tokens,
            "around": [_tokenize(vocabulary, text, special=True, around=True) for text in texts],
            "plain": [_tokenize(vocabulary, text, special=False) for text in texts],
            "texts": [b"".join(_piece(vocabulary, i) for i in ids).decode(errors="replace") for ids in tokens],
            "ends": [
                i
                for i in range(llama_cpp.llama_vocab_n_tokens(vocabulary))
                if llama_cpp.llama_vocab_is_eog(vocabulary, i)
            ],
        }
    finally:
        llama_cpp.llama_model_free(model)


def _tokenize(vocabulary: Any, text: str, *, special: bool, around: bool = False) -> list[int]:
    raw = text.encode()
    room = 2 * len(raw) + 16
    while True:
        buffer = (llama_cpp.llama_token * room)()
        count = llama_cpp.llama_tokenize(vocabulary, raw, len(raw), buffer, room, around, special)
        if count >= 0:
            return list(buffer[:count])
        room = -count


def _piece(vocabulary: Any, token: int) -> bytes:
    room = 64
    while True:
        buffer = ctypes.create_string_buffer(room)
        count = llama_cpp.llama_token_to_piece(vocabulary, token, buffer, room, 0, False)
        if count >= 0:
            return buffer.raw[:count]
        room = -count


messages: list[str] = []


@llama_cpp.llama_log_callback
def _log(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    if level >= 4:  # GGML_LOG_LEVEL_ERROR
        messages.append(text.decode(errors="replace").strip())


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to a request. Raises ValueError if llama.cpp doesn't take the file."""
    if "texts" in request:
        return tokens_of(request["path"], request["texts"])
    np.save(request["out"], logits_of(request["path"], request["ids"], request.get("pooling")))
    return {"out": request["out"]}


def main() -> None:
    """Answers each line of standard input with a line, which has the error if there is one."""
    llama_cpp.llama_log_set(_log, ctypes.c_void_p(0))
    for line in sys.stdin:
        messages.clear()
        try:
            answered = answer(json.loads(line))
        except ValueError as e:
            answered = {"error": "; ".join([str(e), *messages])[-600:]}
        print(f"answer: {json.dumps(answered)}", flush=True)


if __name__ == "__main__":
    main()
