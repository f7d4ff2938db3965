"""Filling in the middle: the prompt from which a model writes the text between a beginning and an end.

    [repository] name, [file] other file's name, its text, ..., [file] name      where the model has these tokens
    [prefix] beginning [suffix] end [middle]

Sources: Bavarian et al. 2022, arXiv 2207.14255; with a repository: Hui et al. 2024, arXiv 2409.12186. ``TEXTS`` has the
tokens' texts, as in llama.cpp. A GGUF file may have other tokens: ``NAMES`` has their names among the special tokens of
a bundle.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

TEXTS: Mapping[str, tuple[str, ...]] = {
    "fim_pre": (
        *("<|fim_prefix|>", "<fim-prefix>", "<fim_prefix>", "<｜fim▁begin｜>", "<PRE>", "▁<PRE>", "<|code_prefix|>"),
        "<|prefix|>",
    ),
    "fim_suf": (
        *("<|fim_suffix|>", "<fim-suffix>", "<fim_suffix>", "<｜fim▁hole｜>", "<SUF>", "▁<SUF>", "<|code_suffix|>"),
        "<|suffix|>",
    ),
    "fim_mid": (
        *("<|fim_middle|>", "<fim-middle>", "<fim_middle>", "<｜fim▁end｜>", "<MID>", "▁<MID>", "<|code_middle|>"),
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
"""Token -> its texts in the vocabularies of models: Qwen2.5-Coder, StarCoder, DeepSeek-Coder, CodeLlama and others."""
NAMES: Mapping[str, tuple[str, ...]] = {
    "fim_pre": ("fim_pre_token", "prefix_token"),
    "fim_suf": ("fim_suf_token", "suffix_token"),
    "fim_mid": ("fim_mid_token", "middle_token"),
    "fim_pad": ("fim_pad_token",),
    "fim_rep": ("fim_rep_token",),
    "fim_sep": ("fim_sep_token",),
}
"""Token -> its names among special tokens: of GGUF files, then of transformers."""
_SUFFIX_FIRST = ("[PREFIX]", "[SUFFIX]")
"""The tokens of Codestral. It reads the end before the beginning, and has no token before the middle."""
_ENDS = ("<EOT>", "▁<EOT>")
"""Tokens that end a middle, besides those that end any answer."""
_SEPARATOR = "\n\n--- snippet ---\n\n"
"""The text before another file where the model has no token for it, as in llama.cpp."""
_MARK = "\n"
"""A text that a tokenizer never joins with the next one to a token."""
_PROJECT, _FILE, _OTHER = "myproject\n", "filename\n", "tmp"
"""The names that llama.cpp uses for a project, a file and another file without a name."""


class TextTokenizer(Protocol):
    """The methods of ``Tokenizer`` that are needed here."""

    @property
    def special_tokens(self) -> Mapping[str, Any]: ...
    def token_id(self, text: str) -> int | None: ...
    def token_bytes(self, index: int) -> bytes: ...
    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


@dataclass(frozen=True)
class Gap:
    """A gap in a text that the model is to fill.

    Attributes:
        prefix: the text before the gap.
        suffix: the text after the gap.
        extra: names and texts of other files.
    """

    prefix: str
    suffix: str
    extra: Sequence[tuple[str, str]] = ()


@dataclass(frozen=True)
class FillInMiddle:
    """A model's tokens for filling in the middle; None for a token that the model lacks.

    Attributes:
        suffix_first: True if the prompt has the end before the beginning.
        ends: further tokens that end the generated middle.
    """

    fim_pre: int
    fim_suf: int
    fim_mid: int | None = None
    fim_pad: int | None = None
    fim_rep: int | None = None
    fim_sep: int | None = None
    suffix_first: bool = False
    ends: tuple[int, ...] = ()

    @classmethod
    def from_tokenizer(cls, tokenizer: TextTokenizer) -> FillInMiddle | None:
        """Returns a model's tokens; None if the model has no prefix, suffix and middle tokens."""
        special, ids = tokenizer.special_tokens, dict[str, int]()
        for role, texts in TEXTS.items():
            named = [special.get(name) for name in NAMES[role]]
            for text in (*named, *texts):
                if isinstance(text, str) and (token := tokenizer.token_id(text)) is not None:
                    ids[role] = token
                    break
        if {"fim_pre", "fim_suf", "fim_mid"} <= ids.keys():
            ends = [token for text in _ENDS if (token := tokenizer.token_id(text)) is not None]
            ends += [ids[role] for role in ("fim_pad", "fim_rep", "fim_sep") if role in ids]
            more = ids.get("fim_pad"), ids.get("fim_rep"), ids.get("fim_sep")
            return cls(ids["fim_pre"], ids["fim_suf"], ids["fim_mid"], *more, ends=tuple(dict.fromkeys(ends)))
        prefix, suffix = map(tokenizer.token_id, _SUFFIX_FIRST)
        return None if prefix is None or suffix is None else cls(prefix, suffix, suffix_first=True)

    def prompt(self, tokenizer: TextTokenizer, gap: Gap, encode: Callable[[str, str], list[int]]) -> list[int]:
        """Returns the token ids of a prompt, with the token that begins any text.

        Args:
            tokenizer: the model's tokenizer.
            gap: the gap to fill.
            encode: called with a field's name (for errors) and its text; returns the token ids.
        """
        ids = _begin(tokenizer)
        if self.fim_rep is not None:
            ids += [self.fim_rep, *encode("input_extra", _PROJECT)]
        for name, text in gap.extra:
            if self.fim_sep is not None:
                ids += [self.fim_sep, *encode("input_extra", f"{name or _OTHER}\n")]
            else:
                ids += encode("input_extra", _SEPARATOR)
            ids += encode("input_extra", text)
        if self.fim_sep is not None:
            ids += [self.fim_sep, *encode("input_extra", _FILE)]
        before = [self.fim_pre, *encode("input_prefix", gap.prefix)]
        after = [self.fim_suf, *_continued(tokenizer, gap.suffix, partial(encode, "input_suffix"))]
        ids += after + before if self.suffix_first else before + after
        return ids if self.fim_mid is None else [*ids, self.fim_mid]


def _begin(tokenizer: TextTokenizer) -> list[int]:
    """Returns the tokens that the model expects before any text."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    whole = tokenizer.encode("a")
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _continued(tokenizer: TextTokenizer, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Returns the tokens of a text that continues another one, without the space that a tokenizer may add at its
    beginning.
    """
    mark = tokenizer.encode(_MARK, add_special_tokens=False)
    if not text or not tokenizer.token_bytes(mark[0]).startswith(b" "):
        return encode(text)
    ids = encode(_MARK + text)
    return ids[len(mark) :] if ids[: len(mark)] == mark else encode(text)
