"""Phrases that a reader has to decode, and what to write instead; ``make lint`` looks for them in docs and sources.

    python tests/plain_words.py [FILE ...]     # by default every page, Python and C++ file that git tracks

A space in a pattern also matches a line's end, in comments too. Names in code are left alone: these are phrases.
"""

from __future__ import annotations

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


COMPILED = [(anywhere(pattern), instead) for pattern, instead in PHRASES]


def main(names: list[str]) -> int:
    """Prints what it finds; 1 if that is anything."""
    if not names:
        command = ["git", "-C", str(REPOSITORY), "ls-files", "*.py", "*.pyi", "*.md", "*.h", "*.cpp"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        names = [str(REPOSITORY / n) for n in listed if not n.startswith(QUOTES_THEM)]
    found = [(name, *one) for name in names for one in findings(Path(name).read_text(encoding="utf-8"))]
    for name, line, said, instead in found:
        print(f'{name}:{line}: "{said}": write {instead}')
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
