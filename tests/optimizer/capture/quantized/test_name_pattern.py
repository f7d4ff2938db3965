"""Patterns of names match what ``re`` matches, in time that their length bounds."""

from __future__ import annotations

import random
import re
import warnings

import pytest

from enginewright.optimizer.capture.quantized.name_pattern import NamePattern
from enginewright.runtime.shared.pattern_tree import TooComplexError

ATOMS = [
    *"abc1",
    ".",
    "[ab]",
    "[^a]",
    "[a-c1]",
    r"\d",
    r"\D",
    r"\w",
    r"\W",
    r"\.",
    r"\s",
    r"\S",
    "(?i:A)",
    "(?i:[B-C])",
]
EDGES = ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?<=a)", "(?<![bc])", "(?=.b)", "(?!c)", "(?m:^|$)"]


def random_pattern(generator: random.Random, depth: int = 0) -> str:
    kind = generator.random()
    if depth > 3 or kind < 0.35:
        return generator.choice(ATOMS)
    if kind < 0.6:
        return random_pattern(generator, depth + 1) + random_pattern(generator, depth + 1)
    if kind < 0.7:
        return f"(?:{random_pattern(generator, depth + 1)}|{random_pattern(generator, depth + 1)})"
    if kind < 0.87:
        often = generator.choice(["*", "+", "?", "*?", "+?", "{2}", "{1,3}", "{0,2}", "{2,}"])
        return f"({random_pattern(generator, depth + 1)}){often}"
    if kind < 0.93:
        return f"{generator.choice(['(?=', '(?!'])}{random_pattern(generator, depth + 1)})"
    return generator.choice(EDGES)


def test_random_patterns_match_what_re_matches() -> None:
    generator = random.Random(7)
    matched = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        for _ in range(3000):
            text = random_pattern(generator)
            ours, theirs = NamePattern(text), re.compile(text)
            for _ in range(3):
                name = "".join(generator.choice("abcAB1.\n") for _ in range(generator.randint(1, 8)))
                assert ours.match(name) == bool(theirs.match(name)), (text, name)
                assert ours.search(name) == bool(theirs.search(name)), (text, name)
                matched += ours.match(name)
    assert 1000 < matched < 8000


@pytest.mark.parametrize(
    "pattern", ["(([a-z_.0-9])+)+!", "(a|a|aa)*!", "(?=(a*)*b)a", "(.*)*(.*)*(.*)*!", "(a?){200}!"]
)
def test_no_pattern_takes_long(pattern: str) -> None:
    """``re`` tries 2^n ways for each of these, for names of n characters."""
    assert not NamePattern(pattern).match("a" * 400)


def test_work_is_bounded() -> None:
    options = "|".join(f"a{'b' * n}" for n in range(1, 100))
    with pytest.raises(TooComplexError, match="too many steps"):
        NamePattern(f"(?:{options})*!").match("ab" * 2000)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(", "missing"),
        ("[", "unterminated"),
        (r"(a)\1", "groupref"),
        (r"(a)?(?(1)b|c)", "groupref_exists"),
        ("(?>a+)b", "atomic_group"),
        ("a++b", "possessive_repeat"),
        ("(" * 5000 + ")" * 5000, "nested too deep"),
        ("a" * 20_000, "more than 10,000 characters"),
        ("a{99999999999999999999}", "repetition"),
    ],
)
def test_what_cannot_be_matched_is_named(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NamePattern(pattern)
