"""Text between a beginning and an end: llama.cpp's /infill, and ``suffix`` in OpenAI's and Ollama's protocols."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.server.conftest import Server

FIM = {"\xf8": "<|fim_prefix|>", "\xf9": "<|fim_suffix|>", "\xfa": "<|fim_middle|>", "\xfb": "<|file_sep|>"}
"""Letters of bytes that no text in UTF-8 has, and the tokens that stand for them here."""


@pytest.fixture(scope="module")
def filling_bundle(tiny_folder: Path, shared_folder: Path) -> Path:
    """The tiny model with tokens for filling in the middle."""
    from enginewright.optimizer.export import export

    bundle = shared_folder / "tiny-fim.bundle"
    with (shared_folder / "tiny-fim.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not bundle.exists():
            folder = shared_folder / "tiny-fim"
            shutil.copytree(tiny_folder, folder)
            file = folder / "tokenizer.json"
            tokenizer = json.loads(file.read_text())
            vocabulary = tokenizer["model"]["vocab"]
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for letter, text in FIM.items():
                vocabulary[text] = vocabulary.pop(letter)
                tokenizer["added_tokens"].append({"id": vocabulary[text], "content": text, "special": True, **plain})
            file.write_text(json.dumps(tokenizer))
            export(folder, bundle, recipe="f32", targets=("cpu",))
    return bundle


@pytest.fixture(scope="module")
def filling(
    filling_bundle: Path, tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, dict[str, int]]]:
    """A server of a model that fills in, and of one that doesn't; the ids of the first one's tokens."""
    models = ("--model", f"code={filling_bundle}", "--model", f"text={tiny_bundle}")
    server = Server(*models, errors=tmp_path_factory.mktemp("infill") / "stderr")
    tokenizer = json.loads((filling_bundle / "tokenizer" / "tokenizer.json").read_text())
    yield server, {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    assert server.stop() == 0, server.errors.read_text()


def prompt_of(server: Server, ids: dict[str, int], parts: list[str]) -> list[int]:
    """The token ids of a prompt whose special tokens are parts of their own."""
    prompt_ids: list[int] = []
    for part in parts:
        tokens = server.ask("POST", "/tokenize", {"model": "code", "content": part}).json["tokens"]
        prompt_ids += [ids[part]] if part in ids else tokens
    return prompt_ids


GREEDY: dict[str, Any] = {"model": "code", "temperature": 0, "ignore_eos": True}


@pytest.mark.matrix
def test_all_protocols_ask_for_the_same_middle(filling: tuple[Server, dict[str, int]]) -> None:
    server, ids = filling
    parts = ["<|file_sep|>", "filename\n", "<|fim_prefix|>", "ab", "<|fim_suffix|>", "yz", "<|fim_middle|>"]
    prompt = prompt_of(server, ids, parts)
    plain = server.complete(prompt, **GREEDY, max_tokens=12).json
    completion = server.complete("ab", suffix="yz", **GREEDY, max_tokens=12).json
    assert completion["choices"][0]["text"] == plain["choices"][0]["text"]
    assert completion["usage"]["prompt_tokens"] == len(prompt)
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "yz", "n_predict": 12, **GREEDY}
    infill = server.ask("POST", "/infill", body).json
    assert infill["content"] == plain["choices"][0]["text"] and infill["stop"] is True
    assert (infill["stop_type"], infill["tokens_predicted"]) == ("limit", 12)
    assert infill["tokens_evaluated"] == len(prompt) and infill["truncated"] is False
    streamed = server.ask("POST", "/infill", body | {"stream": True})
    *events, last = streamed.events
    assert "".join(event["content"] for event in events) == infill["content"]
    assert not any(event["stop"] for event in events) and last["stop"] and last["content"] == ""
    options = {"num_predict": 12, "temperature": 0}
    ollama_body = {"model": "code", "prompt": "ab", "suffix": "yz", "stream": False, "options": options}
    ollama = server.ask("POST", "/api/generate", ollama_body).json
    assert plain["choices"][0]["text"].startswith(ollama["response"]) and ollama["prompt_eval_count"] == len(prompt)
    assert "insert" in server.ask("POST", "/api/show", {"model": "code"}).json["capabilities"]


def test_other_files_come_first(filling: tuple[Server, dict[str, int]]) -> None:
    server, ids = filling
    parts = ["<|file_sep|>", "b.py\n", "x<|fim_middle|>", "<|file_sep|>", "filename\n"]
    parts += ["<|fim_prefix|>", "ab", "<|fim_suffix|>", "yz", "<|fim_middle|>"]
    extra = [{"filename": "b.py", "text": "x<|fim_middle|>"}]
    body = {"input_prefix": "ab", "input_suffix": "yz", "input_extra": extra, "n_predict": 4, **GREEDY}
    answer = server.ask("POST", "/infill", body).json
    # What is spelled like a control token in a file is text: 14 bytes.
    assert answer["tokens_evaluated"] == sum(1 if part in ids else len(part) for part in parts)
    vim = {"samplers": ["top_k", "infill"], "cache_prompt": True, "t_max_predict_ms": 99, "n_indent": 4}
    again = server.ask("POST", "/infill", body | vim)
    assert again.json["content"] == answer["content"]
    assert set(again.headers["x-enginewright-ignored"].split(", ")) == set(vim)


def test_a_token_of_another_file_ends_the_middle(filling: tuple[Server, dict[str, int]]) -> None:
    server, ids = filling
    body = {"input_prefix": "ab", "input_suffix": "yz", "n_predict": 8, "allowed_token_ids": [ids["<|file_sep|>"]]}
    answer = server.ask("POST", "/infill", body | {"model": "code"}).json
    assert (answer["content"], answer["stop_type"], answer["tokens_predicted"]) == ("", "eos", 1)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}, 400, "Infill is not supported by this model"),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}, 400, "Infill is not supported by this model"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, 400, "text does not support insert"),
    ],
)
def test_models_without_the_tokens_say_so(
    filling: tuple[Server, dict[str, int]], path: str, body: dict[str, Any], status: int, message: str
) -> None:
    reply = filling[0].ask("POST", path, body | {"model": "text"})
    assert reply.status == status
    error = reply.json["error"]
    assert (error if isinstance(error, str) else error["message"]).startswith(message)
    assert path != "/v1/completions" or error["param"] == "suffix"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_prefix": "a", "input_suffix": 3}, "input_suffix"),
        ({"input_prefix": "a", "input_suffix": "b", "n": 2, "temperature": 1}, "n"),
        ({"input_prefix": "a", "input_suffix": "b", "prompt": [1]}, "prompt"),
        ({"input_prefix": "a", "input_suffix": "b", "suffix": "c"}, "suffix"),
        ({"input_prefix": "a", "input_suffix": "b", "echo": True}, "echo"),
        ({"input_prefix": "a" * 9999, "input_suffix": "b"}, "input_prefix"),
    ],
)
def test_what_is_wrong_is_named(filling: tuple[Server, dict[str, int]], body: dict[str, Any], field: str) -> None:
    reply = filling[0].ask("POST", "/infill", body | {"model": "code"})
    assert reply.status == 400 and field in reply.json["error"]["message"], reply.json


def test_an_empty_suffix_asks_for_nothing(filling: tuple[Server, dict[str, int]]) -> None:
    server, _ = filling
    plain = server.complete("ab", model="text", temperature=0, max_tokens=4).json["choices"]
    assert server.complete("ab", model="text", temperature=0, max_tokens=4, suffix="").json["choices"] == plain
