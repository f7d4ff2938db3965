"""Phrases, long sentences and docstrings without a verb, which a reader has to decode; ``make lint`` looks for them.

Phrases in docs and sources, with what to write instead; sentences of more than 30 words in docs; docstrings
that begin with a preposition and have no verb.

    python tests/plain_words.py [FILE ...]     # by default every page, Python and C++ file that git tracks

A space in a pattern also matches a line's end, in comments too. Names in code are left alone: these are phrases.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

COMPARED = "longer|more|less|smaller|larger|one|others?|further|worse|faster|better|slower|closer|nearer|later|fewer"

PHRASES: tuple[tuple[str, str], ...] = (
    (rf"(?<!there )(?<!here )\b(is|are|was|were) no (?!({COMPARED})\b)[\w`\"']", "isn't a, aren't, is not a"),
    (r"\bturn(s|ed|ing)? down\b", "reject"),
    (r"\bturn(s|ed|ing)? something down\b", "reject"),
    (r"\bturn(s|ed)? round\b", "transpose, reorder"),
    (r"\bnobody says\b", "by default"),
    (r"\b(by|in|takes?|taking) turns\b", "interleaved, alternate"),
    (r"\b(any|other|its) company\b|\bcompany changes?\b|\bon company\b", "batch: in any batch, batch-invariant"),
    (r"\bin the mean\b", "on average"),
    (r"\bma(ke|kes|king|de) up for\b", "compensate"),
    (r"\blies? behind it\b", "comes after, downstream"),
    (r"\btold the stages?\b|\bprogress: told\b|\b(told|tells?|telling) of\b", "reported, called with"),
    (r"\bto(ld|tell) apart\b", "distinguish"),
    (r"\bcome(s)? by\b", "computed"),
    (r"\bgo(es|ne|ing)? over in\b", "tiled, processed"),
    (r"\brests? in memory\b", "is spilled"),
    (r"\bnobody knows (what|which|whose)\b", "unknown, ambiguous"),
    (r"\bgo(es|ne|ing)? on with\b", "continue with"),
    (r"\bno doing of\b", "outside our control"),
    (r"\bsoon enough for\b", "precedes"),
    (r"\bis what is taken\b", "the default is"),
    (r"\bso as when\b", "this is N times faster than"),
    (r"\bnot so any more\b", "out of date"),
    (r"\bis no good\b", "is invalid"),
)
"""(regular expression, what to write instead)."""

QUOTES_THEM = ("tests/plain_words.py", "tests/test_plain_words.py", "CHANGELOG.md", "docs/use/families.md")


def findings(text: str) -> Iterator[tuple[int, str, str]]:
    """(line, what is written, what to write) of every phrase in a text."""
    for pattern, instead in COMPILED:
        for match in pattern.finditer(text):
            yield text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), instead


def anywhere(pattern: str) -> re.Pattern[str]:
    """The pattern, with each space outside of lookbehinds matching a line's end and a comment's mark as well."""
    pieces = re.split(r"(\(\?<![^)]*\))", pattern)
    return re.compile(
        "".join(p if p.startswith("(?<!") else p.replace(" ", r"\s+(?:(?:#|//)\s+)?") for p in pieces), re.I
    )


LONGEST = 30
"""Words of a sentence in docs."""

STILL_LONG = {
    "docs/inside/architecture.md": 4,
    "docs/inside/benchmark.md": 13,
    "docs/inside/bundle-format.md": 8,
    "docs/inside/claims.md": 6,
    "docs/inside/engines.md": 4,
    "docs/inside/ladder.md": 1,
    "docs/inside/lowered-program.md": 2,
    "docs/inside/notes-cpu.md": 9,
    "docs/inside/notes-gpu-engines.md": 2,
    "docs/inside/numerics.md": 2,
    "docs/inside/ops.md": 1,
    "docs/inside/speculation.md": 11,
    "docs/use/python-reference.md": 2,
}
"""Longer sentences that pages have still. A page may have fewer, and then its number here is lowered."""


def long_sentences(text: str) -> Iterator[tuple[int, int, str]]:
    """(line, words, how it begins) of every sentence of a page that is too long.

    Each item of a list and each cell of a table is a text of its own; code, headings and links' targets don't count.
    """
    text = re.sub(r"^```.*?^```|<!--.*?-->", lambda m: "\n" * m[0].count("\n"), text, flags=re.S | re.M)
    pieces: list[tuple[int, str]] = []
    goes_on = False
    for number, line in enumerate(text.split("\n"), 1):
        if line.lstrip().startswith("|"):
            pieces += [(number, cell) for cell in line.split("|")]
        elif goes_on and line.strip() and not re.match(r"\s*([-*+] |\d+\. |> |#)", line):
            pieces[-1] = (pieces[-1][0], f"{pieces[-1][1]}\n{line}")
            continue
        elif not line.lstrip().startswith("#"):
            pieces.append((number, re.sub(r"^\s*([-*+]|\d+\.|>) ", "", line)))
            goes_on = bool(line.strip())
            continue
        goes_on = False
    for number, piece in pieces:
        at = 0
        for end in re.finditer(r"(?<=[.!?])[)\"*`]*\s+(?=[^a-z])|\Z", piece):
            said = re.sub(r"\]\([^)]*\)", "] ", piece[at : end.start()])
            words = [word for word in said.split() if re.search(r"\w", word)]
            if len(words) > LONGEST:
                yield number + piece.count("\n", 0, at), len(words), " ".join(words[:8])
            at = end.end()


PREPOSITIONS = re.compile(
    "after|along|among|as|at|before|behind|below|beside|between|by|for|from|in|inside|like|of|on|per|since|through|to|"
    "under|until|up|via|with|within|without"
)
VERBS = re.compile(
    r"are|be|been|can|comes|did|do|does|follows?|gets|gives|go|goes|had|has|have|holds|is|lies?|makes|may|might|must|"
    r"needs?|runs|says|should|stands?|takes|was|were|will|works|would|writes|\w+n't"
)
"""Words that show a verb in a first sentence."""


def verbless_docstrings(text: str) -> Iterator[tuple[int, str]]:
    """(line, first sentence) of every docstring that begins with "Of", or with another preposition and has no verb."""
    for statement in ast.walk(ast.parse(text)):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str) or not value.value.strip():
            continue
        sentence = " ".join(re.split(r"(?<=\.)\s|\n\s*\n", value.value.strip(), maxsplit=1)[0].split())
        first, *others = [word.strip("`'\"(),.;:").lower() for word in sentence.split()]
        if first == "of" or (PREPOSITIONS.fullmatch(first) and not any(VERBS.fullmatch(word) for word in others)):
            yield statement.lineno, sentence


COMPILED = [(anywhere(pattern), instead) for pattern, instead in PHRASES]


def main(names: list[str]) -> int:
    """Prints what it finds; 1 if that is anything."""
    if not names:
        command = ["git", "-C", str(REPOSITORY), "ls-files", "*.py", "*.pyi", "*.md", "*.h", "*.cpp"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        there = [n for n in listed if (REPOSITORY / n).is_file() and not n.startswith(QUOTES_THEM)]
        names = [str(REPOSITORY / n) for n in there]
    found = [(name, *one) for name in names for one in findings(Path(name).read_text(encoding="utf-8"))]
    for name, line, said, instead in found:
        print(f'{name}:{line}: "{said}": write {instead}')
    sources = [n for n in names if n.endswith(".py")]
    verbless = [(n, *one) for n in sources for one in verbless_docstrings(Path(n).read_text(encoding="utf-8"))]
    for name, line, sentence in verbless:
        print(f'{name}:{line}: "{sentence}": say with a verb what it does, or begin with "The"')
    too_long = False
    for name in (n for n in names if n.endswith(".md") and "CHANGELOG" not in n):
        sentences = list(long_sentences(Path(name).read_text(encoding="utf-8")))
        path = Path(name).resolve()
        allowed = STILL_LONG.get(str(path.relative_to(REPOSITORY)), 0) if path.is_relative_to(REPOSITORY) else 0
        if len(sentences) > allowed:
            too_long = True
            for line, words, begin in sentences:
                print(f"{name}:{line}: {words} words, at most {LONGEST}: {begin} ...")
            print(f"{name}: {len(sentences)} long sentences, {allowed} are allowed: cut them into short ones")
    return 1 if found or verbless or too_long else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
