r"""The pre-tokenizers that GGUF files name: how a text is split before a byte-level vocabulary merges its parts.

``tokenizer.ggml.pre`` is a name that llama.cpp gives to regular expressions and defaults. Each is written here for the
`tokenizers` library, whose engine (Oniguruma) differs from llama.cpp's in these points:

- llama.cpp's Unicode tables are those of version 15, Oniguruma's are of version 16: ``\p{...}`` leaves out characters
  that version 16 added.
- ``\d`` has the ASCII digits alone in llama.cpp, ``$`` is the end of the text alone, and a class of the Unicode
  categories Lu, Ll, Lt, Lm or Lo has all letters.
- llama.cpp reads white space beyond ASCII as a tab where an expression has no Unicode category, so a range of
  characters doesn't contain it.

Reference: llama.cpp, src/llama-vocab.cpp and src/unicode.cpp, as in llama-cpp-python 0.3.36.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Behavior = Literal["Isolated", "MergedWithPrevious"]

_ADDED_IN_UNICODE_16 = (
    r"\x{897}\x{1B4E}\x{1B4F}\x{1B7F}\x{1C89}\x{1C8A}\x{2427}-\x{2429}\x{31E4}\x{31E5}\x{A7CB}-\x{A7CD}"
    r"\x{A7DA}-\x{A7DC}\x{105C0}-\x{105F3}\x{10D40}-\x{10D8F}\x{10EC2}-\x{10EC4}\x{10EFC}\x{11380}-\x{113E2}"
    r"\x{116D0}-\x{116E3}\x{11BC0}-\x{11BF9}\x{11F5A}\x{13460}-\x{143FA}\x{16100}-\x{16139}\x{16D40}-\x{16D79}"
    r"\x{18CFF}\x{1CC00}-\x{1CEB3}\x{1E5D0}-\x{1E5FF}\x{1F8B2}-\x{1F8C1}\x{1FA89}-\x{1FA8F}\x{1FABE}\x{1FAC6}"
    r"\x{1FADC}-\x{1FADF}\x{1FAE9}\x{1FBCB}-\x{1FBEF}"
)
_CATEGORY = re.compile(r"\\p\{([LNMPS])\}")


def as_in_unicode_15(expression: str) -> str:
    r"""Returns the expression with each ``\p{...}`` limited to the characters of Unicode 15."""
    return _CATEGORY.sub(lambda match: rf"[{match[0]}&&[^{_ADDED_IN_UNICODE_16}]]", expression)


@dataclass(frozen=True)
class Split:
    """One expression of a pre-tokenizer.

    Each match becomes a part, or ends the part before it, as ``behavior`` says.
    """

    expression: str
    behavior: Behavior = "Isolated"


@dataclass(frozen=True)
class PreTokenizer:
    """The settings that the name of a pre-tokenizer implies.

    Attributes:
        splits: regular expressions, each applied to the parts that the previous one made.
        byte_letters: True if the vocabulary writes each byte as a letter, as GPT-2 does; otherwise it has characters,
            and bytes as ``<0x0A>``.
        ignore_merges: True if a part that is a token becomes that token, regardless of the merges.
        add_bos: True if texts begin with the start token, unless the file has another setting.
        always_bos: True if texts begin with the start token even if the file has another setting.
        escape_spaces: True if spaces become U+2581 before the splits.
        whole_newlines: True if a part of newlines that is a token becomes that token, regardless of the merges.
    """

    splits: tuple[Split, ...]
    byte_letters: bool = True
    ignore_merges: bool = False
    add_bos: bool = False
    always_bos: bool = False
    escape_spaces: bool = False
    whole_newlines: bool = False


_CONTRACTION = "'(?:[sS]|[tT]|[rR][eE]|[vV][eE]|[mM]|[lL][lL]|[dD])"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_HAN = (
    r"\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}\x{2B820}-\x{2CEAF}"
    r"\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}"
)
_HAN_AND_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_EAST_ASIAN = r"[[\x{4E00}-\x{9FA5}\x{0800}-\x{4E00}\x{AC00}-\x{D7FF}]&&[^\s]]+"
_CASED_LETTERS = (
    r"A-Za-z\x{00B5}\x{00C0}-\x{00D6}\x{00D8}-\x{00F6}\x{00F8}-\x{01BA}\x{01BC}-\x{01BF}\x{01C4}-\x{0293}"
    r"\x{0295}-\x{02AF}\x{0370}-\x{0373}\x{0376}\x{0377}\x{037B}-\x{037D}\x{037F}\x{0386}\x{0388}-\x{038A}\x{038C}"
    r"\x{038E}-\x{03A1}\x{03A3}-\x{03F5}\x{03F7}-\x{0481}\x{048A}-\x{052F}\x{0531}-\x{0556}\x{10A0}-\x{10C5}"
    r"\x{13A0}-\x{13F5}\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}"
    r"\x{1D79}-\x{1D9A}\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}"
    r"\x{1F5B}\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}\x{2CEB}-\x{2CEE}"
    r"\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}\x{A78B}-\x{A78E}"
    r"\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}\x{10400}-\x{1044F}"
    r"\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}\x{118A0}-\x{118DF}"
    r"\x{1E900}-\x{1E943}"
)
_ASCII_SIGN_AND_LETTERS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"
_WORD_AFTER_NO_SIGN = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"

_GPT2 = r"'(?:[stmd]|re|ve|ll)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_DEEPSEEK3 = rf"{_ASCII_SIGN_AND_LETTERS}|{_WORD_AFTER_NO_SIGN}| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{0964}\x{06D4}\x{060C})]+"


def _cased(letter: str, contraction: str) -> str:
    """Returns an expression for words, which end before a capital letter that follows a small one.

    Args:
        letter: the class of a word's letters.
        contraction: an expression for the word's suffix, such as 's.
    """
    capital, small = f"[{letter}&&[^a-z]]", f"[{letter}&&[^A-Z]]"
    begin = r"[^\r\n\p{L}\p{N}]?"
    return f"{begin}{capital}*{small}+{contraction}|{begin}{capital}+{small}*{contraction}"


def _gpt4o(letter: str) -> str:
    words = _cased(letter, f"(?:{_CONTRACTION})?")
    return rf"{words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


# Digits in groups of three from the right, each of which ends a part: first one or two digits that are left over at the
# beginning of a number, then the threes. Each digit is looked at a few times, however long the number is.
_THREES_FROM_THE_RIGHT = (
    Split(r"(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))", "MergedWithPrevious"),
    Split(r"\p{N}{3}", "MergedWithPrevious"),
)
# The same of ASCII digits, where a part also ends before the first group.
_CUTS_BEFORE_THREES = (
    Split(r"(?<![0-9])[0-9]{0,2}(?=(?:[0-9]{3})++(?![0-9]))", "MergedWithPrevious"),
    Split(r"[0-9]{3}(?=[0-9])", "MergedWithPrevious"),
)
_LINES = Split(r"\n+")


def _split(*splits: str | Split) -> PreTokenizer:
    return PreTokenizer(tuple(one if isinstance(one, Split) else Split(one) for one in splits))


_gpt2 = _split(_GPT2)
_digits_and_gpt2 = _split(r"\p{N}", _GPT2)
_llama3 = _split(_LLAMA3)
_qwen2 = _split(_QWEN2)
_deepseek3 = _split(r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3)
_bloom = _split(_BLOOM)
_characters = replace(_split(_LINES), byte_letters=False, escape_spaces=True)
_gpt4o_words = _split(_gpt4o(r"\p{L}"))
_marked_words = rf"{_MARKED_WORD}(?:{_CONTRACTION})?"
_tiny_aya = _split(*_THREES_FROM_THE_RIGHT, rf"{_marked_words}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_bailing = _split(rf"{_CONTRACTION}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+")
_llama3_with_bos = replace(_llama3, ignore_merges=True, add_bos=True)

_tekken = _split(_cased(r"\p{L}", "") + rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}")
_gemma4 = replace(_characters, always_bos=True, whole_newlines=True)
_kimi_letters = rf"[\p{{L}}&&[^{_HAN}]]+"

_BY_NAMES: Mapping[tuple[str, ...], PreTokenizer] = {
    ("default",): _split(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    ("falcon",): _split(r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"),
    (
        *("gpt-2", "phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum"),
        *("modern-bert", "jina-v1-en", "jina-v2-code", "roberta-bpe", "exaone4", "mpt", "olmo", "jais", "trillion"),
        "granite-docling",
    ): _gpt2,
    (
        *("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    ): _digits_and_gpt2,
    (
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    ): _llama3_with_bos,
    ("dbrx", "smaug-bpe", "chatglm-bpe"): _llama3,
    ("glm4", "glm5"): replace(_llama3, ignore_merges=True),
    ("jais-2",): _split(
        rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
        r"\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)|"
        r"\s{1,2}(?!\S)|\s{1}"
    ),
    (
        *("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
    ): _qwen2,
    ("qwen35",): _split(rf"{_CONTRACTION}|{_MARKED_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"),
    ("ufakzeka",): _split(rf"{_WORD}|\p{{N}}|{_SIGNS}|{_SPACES}"),
    ("seed-coder",): _split(rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"),
    ("bailingmoe", "bailingmoe2", "llada-moe"): _bailing,
    ("laguna",): _split(_LINES, _QWEN2),
    ("exaone-moe",): _split(
        rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ),
    ("minicpm5",): replace(
        _split(r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+|{_SIGNS}|{_SPACES}"), ignore_merges=True
    ),
    ("deepseek-llm",): _split(
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}\x{3002}]+",
        r"\s+\z",
        _EAST_ASIAN,
        r"\p{N}+",
    ),
    ("deepseek-coder",): _split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"): _deepseek3,
    ("spark2_5",): _split(
        r"\p{N}{1,3}",
        _HAN_AND_KANA,
        rf"{_ASCII_SIGN_AND_LETTERS}|{_WORD_AFTER_NO_SIGN}| ?[\p{{P}}\p{{S}}]+|[\r\n]|\s+(?!\S)|\s+",
        r"\p{N}",
    ),
    ("youtu",): replace(
        _split(
            r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|"
            r"[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}\x{FF0C}\x{3001}-\x{303F}"
            rf"\x{{FE30}}-\x{{FE4F}}]+|[\x{{3105}}-\x{{312F}}]+|{_HAN_AND_KANA}",
            rf"{_marked_words}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}",
        ),
        ignore_merges=True,
    ),
    ("poro-chat", "bloom", "gpt3-finnish"): _bloom,
    ("viking",): _split(_BLOOM, r"\p{N}"),
    ("tekken",): replace(_tekken, ignore_merges=True, add_bos=True),
    ("chameleon",): replace(
        _split(
            r"<sentinel:[0-9]+>",
            r"IMGIMG[A-I]{1,4}Z",
            r"[\t\n]|    |  ",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        ),
        add_bos=True,
    ),
    ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"): _gpt4o_words,
    ("granite-embed-multi-97m",): replace(_split(_gpt4o(r"[\p{L}\p{M}]")), ignore_merges=True),
    ("tiny_aya", "cohere2moe"): _tiny_aya,
    ("superbpe",): _split(r"\p{N}+", *_CUTS_BEFORE_THREES),
    ("afmoe",): _split(
        *_THREES_FROM_THE_RIGHT,
        r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
        r"\x{2F00}-\x{2FDF}\x{0E40}-\x{0E7F}\x{0E80}-\x{0EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
        r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+",
        _DEEPSEEK3,
    ),
    ("kimi-k2",): _split(
        rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?{_kimi_letters}(?:{_CONTRACTION})?|\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
    ),
    ("gemma4", "granite-embed-multi-311m"): _gemma4,
    ("sarvam-moe",): _characters,
    ("whitespace",): replace(_split(r"\S+"), byte_letters=False),
}

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: one for names, one in _BY_NAMES.items() for name in names}
"""Value of ``tokenizer.ggml.pre`` -> its settings, for all values that llama.cpp knows."""
