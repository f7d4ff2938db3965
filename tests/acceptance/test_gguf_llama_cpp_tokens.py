"""Tokens of random texts: those of llama.cpp, for every vocabulary and every name of a pre-tokenizer.

``llama_cpp_oracle`` says how to run it. Environment variables:

- GGUF_VOCABULARIES: the folder of llama.cpp's vocabularies, ``vendor/llama.cpp/models`` in the source package of
  llama-cpp-python (`pip download --no-binary :all: --no-deps llama-cpp-python==0.3.36`).
- GGUF_TEXTS: the number of texts for each vocabulary, 2,000 without it.
- GGUF_SEED: of the texts, another each time without it.
- GGUF_REPORT: a file that the counts are written to.
"""

from __future__ import annotations

import json
import os
import secrets
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from enginewright.optimizer.capture.gguf.header import read_header
from enginewright.optimizer.capture.gguf.pretokenizers import PRE_TOKENIZERS
from enginewright.optimizer.capture.gguf.tokenizer import build_files
from enginewright.optimizer.capture.gguf.vocabulary import Kind, Vocabulary, read_vocabulary
from enginewright.optimizer.capture.tokenizer import with_tables
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.text.tokenizer import Tokenizer
from tests.acceptance.llama_cpp_oracle import MARKS, Oracle, write_report
from tests.optimizer.capture.gguf.gguf_vocabularies import (
    CONTROL,
    GOLDEN_TOKENS,
    NORMAL,
    USER_DEFINED,
    digest,
    tricky_vocabulary,
    write_keys,
)
from tests.optimizer.capture.random_texts import LOOKALIKES, TRICKY_TEXTS, random_texts, spared

pytestmark = MARKS

COUNT = int(os.environ.get("GGUF_TEXTS", "2000"))
SEED = int(os.environ.get("GGUF_SEED") or secrets.randbelow(1 << 32))
CACHE = Path.home() / ".cache" / "enginewright"
VOCABULARIES = [
    *("aquila", "baichuan", "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2"),
    *("gpt-neox", "llama-bpe", "llama-spm", "mpt", "nomic-bert-moe", "phi-3", "qwen2", "qwen35", "refact", "starcoder"),
]
REAL_MODELS = ["SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"]


@dataclass(frozen=True)
class Difference:
    """Texts of a vocabulary whose tokens may be others than llama.cpp's."""

    concerns: Callable[[str], bool]
    reason: str


def has_accents_to_sort(text: str) -> bool:
    """Returns True if an accent follows another, or a character that has a compatibility form."""
    return any(
        unicodedata.combining(after)
        and (unicodedata.combining(before) or unicodedata.decomposition(before).startswith("<"))
        for before, after in pairwise(text)
    )


DIFFERENCES: Mapping[str, Difference] = {
    "nomic-bert-moe": Difference(
        has_accents_to_sort,
        "Unicode's form sorts accents before the table is looked up, and composes across entries; the library can't "
        "look up the longest entry of a letter and its accents itself",
    )
}
"""The differences by the name of a vocabulary. All other texts have equal tokens."""

MOST_SPECIAL = 40
SHOWN = 5


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Oracle]:
    oracle = Oracle(tmp_path_factory.mktemp("oracle"))
    yield oracle
    oracle.close()


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The keys of a byte-level vocabulary that is trained on texts of the same kind, without a pre-tokenizer.

    So its merges go over every boundary that a pre-tokenizer may set. None of them makes a control token.
    """
    texts = (text for text in random_texts(6000, SEED + 1) if not any(one in text for one in LOOKALIKES))
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=6000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=12,
    )
    trained.train_from_iterator(texts, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = {"<|begin|>": CONTROL, "<|stop|>": CONTROL, "<｜User｜>": CONTROL, "[PAD]": CONTROL}
    special |= {"<|im_end|>": USER_DEFINED, "<thinking>": USER_DEFINED, "   \t": USER_DEFINED}
    tokens = [text for text in tokens if text not in special]
    return {
        "model": "gpt2",
        "tokens": [*tokens, *special],
        "token_type": [NORMAL] * len(tokens) + list(special.values()),
        "merges": [" ".join(pair) for pair in model["merges"] if "".join(pair) not in special],
        "bos_token_id": len(tokens),
        "eos_token_id": len(tokens) + 1,
    }


@pytest.mark.parametrize("name", VOCABULARIES)
def test_llama_cpps_vocabularies(name: str, oracle: Oracle) -> None:
    folder = os.environ.get("GGUF_VOCABULARIES")
    if folder is None:
        pytest.skip("GGUF_VOCABULARIES names no folder of llama.cpp's vocabularies")
    compare(name, Path(folder) / f"ggml-vocab-{name}.gguf", oracle)


@pytest.mark.parametrize("pre", [None, *PRE_TOKENIZERS])
def test_a_byte_level_vocabulary_under_each_name(
    pre: str | None, byte_level: dict[str, Any], oracle: Oracle, tmp_path: Path
) -> None:
    compare(f"pre {pre}", write_keys(tmp_path / "vocabulary.gguf", byte_level | {"pre": pre}), oracle)


@pytest.mark.parametrize("name", REAL_MODELS)
def test_real_models(name: str, oracle: Oracle) -> None:
    if not (CACHE / name).exists():
        pytest.skip(f"{name} isn't in the cache")
    compare(name, CACHE / name, oracle)


def test_the_golden_tokens(oracle: Oracle, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    keys = tricky_vocabulary()
    digests: dict[str, str] = {}
    for pre in PRE_TOKENIZERS:
        answer = oracle.tokens(write_keys(tmp_path / "tricky.gguf", keys | {"pre": pre}), spared(TRICKY_TEXTS, pre))
        assert answer is not None
        digests[pre] = digest(answer["around"])
    if pytestconfig.getoption("--update-golden"):
        GOLDEN_TOKENS.write_text(json.dumps(digests, indent=1) + "\n")
    assert digests == json.loads(GOLDEN_TOKENS.read_text())


def compare(name: str, path: Path, oracle: Oracle) -> None:
    """Asserts that both have the same tokens of ``COUNT`` texts, the same texts of these, and the same ends."""
    keys = read_header(path).keys
    vocabulary = read_vocabulary(path, keys)
    assert vocabulary is not None
    files = build_files(vocabulary, keys)
    texts = spared(random_texts(COUNT, SEED, special_of(vocabulary)), keys.get("tokenizer.ggml.pre"))
    expected = oracle.tokens(path, texts)
    assert expected is not None, f"llama.cpp doesn't take {name}, or aborts; the seed is {SEED}"
    answers = tokens_of(files, texts, expected["tokens"])
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for kind, ours in answers.items():
        for text, mine, other in zip(texts, ours, expected["tokens" if kind == "quick" else kind], strict=True):
            if kind == "texts" and "\ufffd" in other and "\ufffd" not in text:
                other = mine  # the vocabulary lacks some bytes of a character
            if kind == "texts" and (vocabulary.space_prefix or vocabulary.model == "bert"):
                other = other if mine == other else other.removeprefix(" ")
            if mine == other:
                counts[kind] += 1
            elif name in DIFFERENCES and DIFFERENCES[name].concerns(text):
                counts["declared"] += 1
            else:
                shown = (f"{mine!a:.300}", f"{other!a:.300}")
                wrong.append(f"{name}: {kind} of {text!a:.200}: {shown[0]}, not {shown[1]}")
    declared = counts.pop("declared", 0)
    sizes = {"texts": len(texts), "tokens": sum(map(len, expected["tokens"]))}
    write_report({"vocabulary": name, "seed": SEED, **sizes, "equal": counts, "declared": declared, "wrong": wrong})
    assert sorted(vocabulary.end_ids) == expected["ends"]
    assert not wrong, "\n".join([f"{len(wrong)} differ; the seed is {SEED}", *sorted(wrong, key=len)[:SHOWN]])


def tokens_of(files: TokenizerFiles, texts: Sequence[str], ids: Sequence[Sequence[int]]) -> dict[str, list[Any]]:
    """The answers of a bundle's tokenizer, by the oracle's names; "quick" has only read its tables.

    Args:
        files: of the tokenizer.
        texts: to be encoded.
        ids: to be decoded, a list for each text.
    """
    tokenizer = Tokenizer(files)
    with_both = with_tables(files)
    quick = Tokenizer(with_both, lambda: str(with_both.tokenizer_json))
    return {
        "tokens": [tokenizer.encode(text, add_special_tokens=False) for text in texts],
        "around": [tokenizer.encode(text) for text in texts],
        "plain": [tokenizer.encode_guarded(text) for text in texts],
        "texts": [tokenizer.decode(one) for one in ids],
        "quick": [quick.encode(text, add_special_tokens=False) for text in texts],
    }


def special_of(vocabulary: Vocabulary) -> list[str]:
    """The texts of control tokens and user-defined tokens: the first of them, and some of the others."""
    kinds = Kind.CONTROL | Kind.USER_DEFINED | Kind.UNKNOWN
    special = [text for text, kind in zip(vocabulary.tokens, vocabulary.kinds, strict=True) if kind & kinds]
    if len(special) <= MOST_SPECIAL:
        return special
    half = MOST_SPECIAL // 2
    return special[:half] + special[half :: len(special) // half]
