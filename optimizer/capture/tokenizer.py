"""Captures a tokenizer: the text of tokenizer.json, the chat template and the special tokens."""

from __future__ import annotations

import inspect
import json
import os
import re
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, TokenizersBackend
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, open_regular, read_regular
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.bundle.tokenizer_tables import TokenizerTables, tables_of
from enginewright.runtime.shared.errors import SourceError
from enginewright.runtime.text.formats.response_template import UnknownShapeError, converted
from enginewright.runtime.text.formats.table import PLAIN
from enginewright.runtime.text.quick_tokenizer import QuickTokenizer
from enginewright.runtime.text.tokenizer import library_tokenizer, what_tokenizers_raises
from enginewright.runtime.text.tokenizer_limits import check_tokenizer_json

from .check_source import CONFIG, read_json

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_SUFFIXES = (".json", ".jinja", ".model", ".txt")
_TRIED = (
    "The quick brown fox's 3 hens: isn't it 12,345.67 km?\n\n\tdef f(x):\n        return x**2  # naïve\r\n",
    "Ünïcödé, ﬁ, Ⅷ, ½, e\u0301, 東京で会いましょう。 Привет, мир! שלום עולם مرحبا 🧑‍🚀👍🏽 \u00a0\u200b\ufeff\0\x07",
)
TOKENIZER_JSON = "tokenizer.json"
_VERSIONS_OF_JSON = re.compile(r"tokenizer(\.[0-9.]+)?\.json")
"""Matches tokenizer.json, and the names of its variants for other versions of transformers.

tokenizer_config.json lists the variants.
"""
_FILES = (TOKENIZER_JSON, "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(directory: Path) -> PreTrainedTokenizerBase | None:
    """Returns the tokenizer of a model directory, None if it has none. It never uses the network.

    A tokenizer.json alone decides the tokens of a text. The class of transformers in tokenizer_config.json isn't used
    then, because it would replace parts of the file by its own.

    Raises SourceError naming the directory if its tokenizer can't be read.
    """
    if not any(os.path.lexists(directory / f) for f in _FILES):
        return None
    has_json = (directory / TOKENIZER_JSON).is_file()
    _check_files(directory)
    hint = "Pass a tokenizer of your own, or a directory that has its tokenizer.json."
    loader = TokenizersBackend if has_json else AutoTokenizer
    with what_tokenizers_raises(lambda e: SourceError(f"{directory}: the tokenizer can't be read: {e}", hint=hint)):
        loaded = loader.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
        assert isinstance(loaded, PreTrainedTokenizerBase)
        if has_json:
            _name_special_tokens(loaded, directory)
    if not loaded.chat_template:
        loaded.chat_template = _processor_template(directory)
    return loaded


def read_tokenizer_json(directory: Path) -> str | None:
    """Returns the text of a directory's tokenizer.json, None if it has none.

    Raises SourceError naming the file if it can't be read, or would take endless time or memory.
    """
    path = directory / TOKENIZER_JSON
    return _checked_json(path) if path.is_file() else None


def _checked_json(path: Path) -> str:
    if not isinstance(read_json(path, repeats=True).get("model"), dict):
        raise SourceError(f"{path}: model is missing", hint="Download the file again.")
    try:
        text = read_regular(path, most=MOST_TEXT_BYTES).decode()
        check_tokenizer_json(text)
    except (OSError, ValueError) as e:
        raise SourceError(f"{path}: {e}", hint="Download the file again, or take another tokenizer.") from e
    return text


def _check_files(directory: Path) -> None:
    """Raises SourceError naming a file of a tokenizer that transformers would wait for, fail on or be misled by."""
    for file in sorted(directory.iterdir()):
        if file.suffix in _SUFFIXES and (not file.is_dir() or file.name in _FILES):
            try:
                open_regular(file, most=MOST_TEXT_BYTES).close()  # transformers would wait for a pipe
            except OSError as e:
                raise SourceError(f"{file}: can't be read: {e.strerror}", hint="Download the file again.") from e
        if file.is_file() and _VERSIONS_OF_JSON.fullmatch(file.name):
            _checked_json(file)
    for name in ("special_tokens_map.json", "added_tokens.json", "tokenizer_config.json"):
        config = read_json(directory / name) if (directory / name).is_file() else {}
    check_templates(config.get("chat_template"), f"{directory / 'tokenizer_config.json'}: chat_template")


def check_templates(template: object, where: str) -> None:
    """Raises SourceError if ``template`` is neither a chat template nor several named ones, in transformers' forms.

    ``where``: the file, for the message.
    """
    listed = template if isinstance(template, list) else [template]
    if isinstance(template, dict):
        listed = [{"name": name, "template": text} for name, text in template.items()]
    for one in listed:
        texts = [one.get("name"), one.get("template")] if isinstance(one, dict) else [one]
        if not all(isinstance(text, str) for text in texts) and template is not None:
            raise SourceError(
                f"{where} is {template!r:.60}, and no chat template", hint="Correct it, or leave the field out."
            )


def gives_types(directory: Path) -> bool:
    """Returns True if a folder's tokenizer gives types of tokens to the model; also for a folder without tokenizer.

    Without them, all tokens of a pair have the type 0.
    """
    if not any(os.path.lexists(directory / f) for f in _FILES):
        return True
    config, known = _config_and_class(directory)
    names: Sequence[str] = config.get("model_input_names") or getattr(known, "model_input_names", None) or ()
    return "token_type_ids" in names


def _config_and_class(directory: Path) -> tuple[dict[str, Any], Any]:
    """Returns a folder's tokenizer_config.json, and the tokenizer's class in transformers; None for an unknown one."""
    path = directory / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    kind = config.get("tokenizer_class")
    if kind is None and (directory / CONFIG).is_file():
        document = read_json(directory / CONFIG)
        kind = document.get("tokenizer_class") or TOKENIZER_MAPPING_NAMES.get(str(document.get("model_type")))
    return config, tokenizer_class_from_name(kind) if isinstance(kind, str) else None


def _name_special_tokens(loaded: PreTrainedTokenizerBase, directory: Path) -> None:
    """Sets the special tokens, such as ``eos_token``, of a tokenizer whose configuration doesn't name them.

    They are the defaults of the tokenizer's class in transformers, as far as the vocabulary has them.
    """
    config, known = _config_and_class(directory)
    vocabulary = loaded.get_vocab()
    for name, parameter in inspect.signature(known.__init__).parameters.items() if known is not None else ():
        default = parameter.default
        if name in _SPECIAL and name not in config and getattr(loaded, name, None) is None and default in vocabulary:
            setattr(loaded, name, default)


def _processor_template(directory: Path) -> str | None:
    """Returns the chat template in chat_template.json, an older file of models with images that tokenizers
    don't read.
    """
    path = directory / "chat_template.json"
    if not path.is_file():
        return None
    template = read_json(path).get("chat_template")
    if not isinstance(template, str):
        raise SourceError(f"{path}: chat_template is missing, or no text", hint="Download the file again.")
    return template


def tokenizer_files(tokenizer: PreTrainedTokenizerBase) -> TokenizerFiles:
    """Returns the files that a bundle stores for ``tokenizer``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    # Some have more that are named, such as image_token: variables of the chat template like the others.
    named = dict.fromkeys([*_SPECIAL, *tokenizer.special_tokens_map])
    special: dict[str, str | bool | None] = {
        name: None if value is None else str(value)
        for name in named
        if name.endswith("_token")
        for value in [getattr(tokenizer, name, None)]
    }
    special |= {"add_bos": False, "add_eos": False}  # a post-processor adds them, if they are to be added
    templates = _chat_templates(tokenizer)
    text: str | None = None
    hint = "Pass a tokenizer of your own, or a directory that has its tokenizer.json."
    with what_tokenizers_raises(lambda e: SourceError(f"the tokenizer can't be kept: {e}", hint=hint)):
        if backend is not None and hasattr(backend, "to_str"):
            text = quick_to_read(backend.to_str())
            check_tokenizer_json(text)
    return TokenizerFiles(
        tokenizer_json=text,
        chat_template=templates.pop("default", None),
        special_tokens=special,
        other_templates=templates,
        response_template=_response_template(tokenizer),
    )


def in_lower_case(files: TokenizerFiles) -> TokenizerFiles:
    """Returns the files of a tokenizer that first converts a text to lower case, and then does what ``files`` says."""
    if files.tokenizer_json is None:
        return files
    document = json.loads(files.tokenizer_json)
    first: list[dict[str, object]] = [{"type": "Lowercase"}]
    before = document.get("normalizer")
    document["normalizer"] = {"type": "Sequence", "normalizers": first if before is None else [*first, before]}
    return replace(files, tokenizer_json=json.dumps(document, ensure_ascii=False))


def quick_to_read(tokenizer_json: str) -> str:
    """Rewrites a tokenizer with each merge as one text, "a b" for ["a", "b"]: the library's older form.

    The library reads this form in three quarters of the time and with two fifths of the memory. If a token contains a
    space, the forms aren't equivalent, and the text is returned unchanged.
    """
    document = json.loads(tokenizer_json)
    if document["model"].get("dropout"):  # merges that are left out at random, in training
        document["model"]["dropout"] = None
        tokenizer_json = json.dumps(document, ensure_ascii=False)
    merges = document["model"].get("merges")
    if not merges or any(" " in part for merge in merges for part in merge):
        return tokenizer_json
    document["model"]["merges"] = [" ".join(merge) for merge in merges]
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    read = tokenizers.Tokenizer.from_str(text).to_str()
    same = read == tokenizer_json or read == tokenizers.Tokenizer.from_str(tokenizer_json).to_str()
    return text if same else tokenizer_json


def with_tables(files: TokenizerFiles) -> TokenizerFiles:
    """Adds the tables that let a bundle's tokenizer start quickly, if the tokenizer allows them.

    The tables are tested on a few texts and on the texts of some of its tokens. If a result differs from the library's,
    or the library can't tokenize a text, the files are returned unchanged.
    """
    text = files.tokenizer_json
    tables = tables_of(text) if text is not None else None
    if text is None or tables is None:
        return files
    whole = library_tokenizer(text)
    quick = QuickTokenizer(TokenizerTables(tables), lambda: whole)
    names = [quick.id_to_token(index) or "" for index in range(0, whole.get_vocab_size(), 97)]
    tried = (*_TRIED, " ".join(names[: len(names) // 2]), "".join(names[len(names) // 2 :]))
    with suppress(SourceError), what_tokenizers_raises(lambda e: SourceError(str(e))):
        ids = [whole.encode(one).ids for one in tried]
        texts = [whole.decode(one, skip_special_tokens=False) for one in ids]
        if ids == [quick.merged(one, add_special_tokens=True) for one in tried] and texts == [
            quick.decode(one, skip_special_tokens=False) for one in ids
        ]:
            return replace(files, tables=tables)
    return files


def _response_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Returns transformers' template for parsing an answer, as JSON; None if there is none or it isn't a
    dictionary.
    """
    template = getattr(tokenizer, "response_template", None)
    if not isinstance(template, dict):
        return None
    try:
        converted(template, PLAIN)
    except UnknownShapeError as e:
        warnings.warn(
            f"tokenizer_config.json: {e}: it can't be read here, so calls are told by what the chat template writes",
            stacklevel=2,
        )
    return json.dumps(template, ensure_ascii=False, sort_keys=True) + "\n"


def _chat_templates(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Returns the chat templates by name; a single one is named "default"."""
    template = tokenizer.chat_template
    check_templates(template, "the tokenizer's chat_template")
    templates: dict[str, str] = template if isinstance(template, dict) else {"default": template}
    return {name: text for name, text in templates.items() if text}
