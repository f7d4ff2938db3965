"""The tokenizer folder is written and read back."""

from __future__ import annotations

from typing import Any

import pytest

from enginewright.runtime.bundle.tokenizer_files import SPECIAL_TOKENS_PATH, TokenizerFiles
from enginewright.runtime.shared.errors import BundleError


@pytest.mark.parametrize(
    "files",
    [
        TokenizerFiles(),
        TokenizerFiles('{"a": "é"}', "{{ bos_token }}", {"bos_token": "<s>", "pad_token": None, "add_bos": True}),
        TokenizerFiles(chat_template="a", other_templates={"tool_use": "é", "rag": ""}),
    ],
)
def test_round_trip(files: TokenizerFiles) -> None:
    written = files.to_files()
    assert TokenizerFiles.from_files(written) == files
    templates = (files.chat_template is not None) + len(files.other_templates)
    assert len(written) == 1 + (files.tokenizer_json is not None) + templates
    assert all(path.startswith("tokenizer/") for path in written)


def test_order_does_not_show() -> None:
    one, other = {"a_token": "a", "b_token": "b"}, {"b_token": "b", "a_token": "a"}
    assert TokenizerFiles(special_tokens=one).to_files() == TokenizerFiles(special_tokens=other).to_files()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"\xff", "not UTF-8"),
        (b"[]", "must be an object"),
        (b'{"bos_token": 3}', "bos_token is 3"),
        (b'{"add_bos": "yes"}', "add_bos is 'yes'"),
    ],
)
def test_damage_is_named(data: bytes, message: str) -> None:
    with pytest.raises(BundleError, match=rf"special_tokens\.json: {message}"):
        TokenizerFiles.from_files({SPECIAL_TOKENS_PATH: data})


def test_a_missing_file() -> None:
    with pytest.raises(BundleError, match=r"special_tokens\.json is missing"):
        TokenizerFiles.from_files({})


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "a b"])
def test_names_that_no_file_has_are_not_written(name: str) -> None:
    with pytest.raises(BundleError, match="chat template"):
        TokenizerFiles(other_templates={name: "x"}).to_files()


def test_wrong_values_are_not_written() -> None:
    wrong: Any = {"eos_token": 2}
    with pytest.raises(BundleError, match="eos_token is 2"):
        TokenizerFiles(special_tokens=wrong).to_files()
