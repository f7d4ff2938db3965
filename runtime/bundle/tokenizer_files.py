"""The ``tokenizer/`` folder of a bundle:

    tokenizer/tokenizer.json         a file of the `tokenizers` library; missing if the source has no fast tokenizer
        (then
                                     prompts are ids). Each merge is one text where possible: that loads faster
    tokenizer/tables.bin             its tokens and merges as arrays, if possible: see ``tokenizer_tables``
    tokenizer/chat_template.jinja    a Jinja template as transformers renders it; missing if the model has none. If a
                                     source has several templates, this is the one named "default"
    tokenizer/chat_templates/NAME.jinja    the other templates, such as "tool_use"
    tokenizer/response_template.json    transformers' description of the model's answers, if the model has one
    tokenizer/special_tokens.json    always present: one JSON object with

        "bos_token", "eos_token", "pad_token", "unk_token", ... : text of the token, or null
        "add_bos", "add_eos"                                    : true if the *caller* must add the token, because
                                                                  tokenizer.json's post-processor doesn't

Every ``*_token`` entry is a variable of the chat template, as in transformers. The ids that end a text aren't here, but
in ``model.eos_token_ids`` of the manifest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..shared.errors import BundleError
from ..shared.json_document import parse_json
from .tokenizer_tables import TABLES_PATH

TOKENIZER_FOLDER = "tokenizer/"
TOKENIZER_PATH = "tokenizer/tokenizer.json"
CHAT_TEMPLATE_PATH = "tokenizer/chat_template.jinja"
RESPONSE_TEMPLATE_PATH = "tokenizer/response_template.json"
CHAT_TEMPLATES_FOLDER = "tokenizer/chat_templates/"
SPECIAL_TOKENS_PATH = "tokenizer/special_tokens.json"

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_\-]*")

SpecialTokens = Mapping[str, str | bool | None]


@dataclass(frozen=True)
class TokenizerFiles:
    """The contents of ``tokenizer/``; None for a file that is missing.

    Attributes:
        chat_template: the default template.
        other_templates: name -> template, for the others.
        response_template: JSON.
    """

    tokenizer_json: str | None = None
    chat_template: str | None = None
    special_tokens: SpecialTokens = field(default_factory=dict)
    other_templates: Mapping[str, str] = field(default_factory=dict)
    response_template: str | None = None
    tables: bytes | None = None

    def to_files(self) -> dict[str, bytes]:
        """Returns the files as path in the bundle -> contents; equal objects give equal bytes.

        Raises BundleError if a special token has the wrong type, or a template's name can't be a file name.
        """
        special = json.dumps(_checked(self.special_tokens), sort_keys=True, indent=1, ensure_ascii=False) + "\n"
        files = {SPECIAL_TOKENS_PATH: special.encode()}
        if self.tokenizer_json is not None:
            files[TOKENIZER_PATH] = self.tokenizer_json.encode()
        if self.tables is not None:
            files[TABLES_PATH] = self.tables
        if self.chat_template is not None:
            files[CHAT_TEMPLATE_PATH] = self.chat_template.encode()
        if self.response_template is not None:
            files[RESPONSE_TEMPLATE_PATH] = self.response_template.encode()
        for name in sorted(self.other_templates):
            if not _NAME.fullmatch(name):
                raise BundleError(f"chat template {name!r}: it can't be kept under this name", hint="Rename it.")
            files[f"{CHAT_TEMPLATES_FOLDER}{name}.jinja"] = self.other_templates[name].encode()
        return files

    @classmethod
    def from_files(cls, files: Mapping[str, bytes]) -> TokenizerFiles:
        """Reverses ``to_files``. Raises BundleError naming the file that is missing or damaged."""
        if SPECIAL_TOKENS_PATH not in files:
            raise BundleError(f"{SPECIAL_TOKENS_PATH} is missing", hint="Export the bundle again.")
        try:
            special = parse_json(_text(files, SPECIAL_TOKENS_PATH) or "")
        except ValueError as e:
            raise BundleError(f"{SPECIAL_TOKENS_PATH}: not JSON: {e}", hint="Export the bundle again.") from e
        others = {
            path.removeprefix(CHAT_TEMPLATES_FOLDER).removesuffix(".jinja"): _text(files, path) or ""
            for path in files
            if path.startswith(CHAT_TEMPLATES_FOLDER)
        }
        return cls(
            tokenizer_json=_text(files, TOKENIZER_PATH),
            chat_template=_text(files, CHAT_TEMPLATE_PATH),
            special_tokens=_checked(special),
            other_templates=others,
            response_template=_text(files, RESPONSE_TEMPLATE_PATH),
            tables=files.get(TABLES_PATH),
        )


def _text(files: Mapping[str, bytes], path: str) -> str | None:
    if path not in files:
        return None
    try:
        return files[path].decode()
    except UnicodeDecodeError as e:
        raise BundleError(f"{path}: not UTF-8: {e}", hint="Export the bundle again.") from e


def _checked(special: object) -> dict[str, str | bool | None]:
    """Returns ``special`` if "add_*" entries are booleans and the others texts or None; otherwise raises
    BundleError.
    """
    if not isinstance(special, Mapping):
        raise BundleError(f"{SPECIAL_TOKENS_PATH}: must be an object", hint="Export the bundle again.")
    for name, value in special.items():
        of_type = isinstance(value, bool) if name.startswith("add_") else value is None or isinstance(value, str)
        if not of_type:
            raise BundleError(f"{SPECIAL_TOKENS_PATH}: {name} is {value!r}", hint="Export the bundle again.")
    return dict(special)
