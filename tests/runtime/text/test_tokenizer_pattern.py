"""Regular expressions of tokenizers in use are read and pass; hostile ones are refused."""

from __future__ import annotations

import random

import pytest
import tokenizers

from enginewright.runtime.shared.pattern_tree import TooComplexError
from enginewright.runtime.text.tokenizer_pattern import read_tokenizer_pattern

_WORD = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

IN_USE = {
    "gpt2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _SPACES,
    "o200k": _WORD + r"*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t)?|" + _WORD + r"+[\p{Ll}\p{Lm}]*|\p{N}{1,3}" + _SPACES,
    "kimi": r"[\p{Han}]+|[\p{Lu}\p{Lo}&&[^\p{Han}]]*[\p{Ll}\p{Lo}&&[^\p{Han}]]+(?i:'s|'t)?" + _SPACES,
    "tiktoken": r"'(?i:[sdmt]|ll)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++|\s++$|\s*[\r\n]|\s",
    "bloom": r" ?[^(\s|[.,!?…。，、।۔،])]+",
    "exaone": r"[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}",
    "galactica": r"[\(\)\[\]\{\}]|([!\"\#\$\%\&\'\*\+\,\-\./:;\<=\>\?\\\^_\`\|\~])\1*",
    "command": r"\d{1,3}(?=(?:\d{3})*\b)",
    "superbpe": r"(?=(\d{3})+(?!\d))",
    "falcon": r"[\p{P}\$\+<=>\^~\|`]+",
    "deepseek": r"[一-龥ࠀ-一가-퟿]+",
    "afmoe": r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+""",
    "chameleon": r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
    "seamless": r"^▁+$| +▁| {2,}|\s{2,}|[\n\r\t]",
    "verbose": "(?x) a+ b  # words\n | \\x{2581} | \\u3000",
}


@pytest.mark.parametrize("name", IN_USE)
def test_patterns_in_use_pass(name: str) -> None:
    tokenizers.Regex(IN_USE[name])
    read_tokenizer_pattern(IN_USE[name]).check_backtracking()


@pytest.mark.parametrize(
    "pattern",
    [
        r"(a+)+$",
        r"(\s*\S*)*x",
        r"(\p{L}+\p{Lu}*)+!",
        r"(\w|\p{Han})*!",
        r"(?:[a-m]|[k-z])*!",
        r"(a{1,3}+)+b",
        r"(?i)(K|k)*x",
        r"(?=(a+)+$)x",
        r"((?=a*b)a)*c",
        r"(?:\d|[[:alnum:]])*!",
        r"([\p{L}--]+)*x",
        r"(a)(\1)*(\1)*!",
        "(" * 60 + ")" * 60,
        "a" * 10_001,
    ],
)
def test_patterns_that_may_take_endless_time_are_refused(pattern: str) -> None:
    with pytest.raises(TooComplexError):
        read_tokenizer_pattern(pattern).check_backtracking()


@pytest.mark.parametrize(
    "pattern", ["(", ")", "(a", r"\p{L", "[a", r"(a)\g<1>", "(?~a)", "a\\", "(?<n", "(?#", r"\x{}"]
)
def test_what_is_no_pattern_is_an_error(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_tokenizer_pattern(pattern)


def test_random_patterns_match_as_the_library_matches() -> None:
    """The reader understands the syntax as the library does: the first match ends in the same texts."""
    generator = random.Random(11)
    atoms = [*"ab1", ".", "[ab]", "[^a]", "[a-c&&[^b]]", r"\d", r"\S", r"\p{L}", r"\p{^Ll}", r"\P{N}", "(?i:B)", r"\h"]
    compared = 0
    for _ in range(600):
        parts = []
        for _ in range(generator.randint(1, 3)):
            atom = generator.choice(atoms)
            parts.append(
                generator.choice([atom, f"{atom}{generator.choice(['*', '+', '?', '{2}', '{1,2}+'])}", f"(?={atom})"])
            )
        pattern = "".join(parts)
        splitter = tokenizers.pre_tokenizers.Split(tokenizers.Regex(f"\\A(?:{pattern})"), "removed")
        text = "".join(generator.choice("abcB1 é") for _ in range(generator.randint(1, 5)))
        pieces = splitter.pre_tokenize_str(text)
        begins = not pieces or pieces[0][1][0] > 0  # the match at the begin was taken out
        if read_tokenizer_pattern(pattern).shortest() == 0:
            continue
        compared += 1
        assert read_tokenizer_pattern(pattern).matches(text) == begins, (pattern, text)
    assert compared > 300
