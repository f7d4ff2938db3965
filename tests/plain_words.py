"""Shapes of English that a reader has to decode: first words of docstrings, names of locals, sentences of docs.

    python tests/plain_words.py [FILE ...]     # by default every Python file and page that git tracks

``make lint`` runs it. A docstring begins with a verb ("Returns the ...") or with a noun and its article; a local is
named for its content; a sentence in docs has its subject first and at most 30 words.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent

FIRST_WORDS = ("What", "Who", "How", "Whether", "Where", "That", "Those", "Of", "So", "As", "The same", "See")
"""Words that no docstring begins with."""

LOCALS = ("found", "given", "made", "asked", "told", "kept", "wanted", "own", "said", "taken")
"""Names that tell how a value was got, which no local variable has."""

STARTS = ("Of", "What", "Who", "That")
"""Words that no sentence in docs begins with."""

LONGEST = 30
"""Words of a sentence in docs."""

NOT_CLEAN: tuple[str, ...] = ()
"""Folders with older texts that break a rule; a name of one part covers its own files, one of two all below it.

Only long sentences count there. The list gets shorter and never longer: a folder that has become clean must leave it.
"""

STILL_LONG = {
    "benchmarks/notes/benchmark.md": 13,
    "benchmarks/notes/claims.md": 6,
    "benchmarks/notes/cpu.md": 9,
    "benchmarks/notes/gpu-engines.md": 2,
    "benchmarks/notes/ladder.md": 1,
    "benchmarks/notes/speculation.md": 11,
    "docs/inside/bundle-format.md": 1,
    "docs/inside/stored-weights.md": 2,
    "benchmarks/notes/engines.md": 4,
}
"""Longer sentences that pages have still. A page may have fewer, and then its number here is lowered."""


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, text) of every sentence of a page.

    Each item of a list and each cell of a table is a text by itself; code and headings don't count.
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
        start = 0
        for end in re.finditer(r"(?<=[.!?])[)\"*`]*\s+(?=[^a-z])|\Z", piece):
            if sentence := piece[start : end.start()].strip():
                yield number + piece.count("\n", 0, start), sentence
            start = end.end()


def long_sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, message) of every sentence of a page that is too long; links' targets don't count."""
    for line, sentence in sentences(text):
        words = [word for word in re.sub(r"\]\([^)]*\)", "] ", sentence).split() if re.search(r"\w", word)]
        if len(words) > LONGEST:
            yield line, f"{len(words)} words, at most {LONGEST}: {' '.join(words[:8])} ..."


def sentence_starts(text: str) -> Iterator[tuple[int, str]]:
    """Yields (line, message) of every sentence of a page, questions excepted, that begins with one of `STARTS`."""
    for line, sentence in sentences(text):
        first = re.match(rf"[*\"(]*({'|'.join(STARTS)})\s", sentence)
        if first and not re.search(r"\?[)\"*]*$", sentence):
            begin = " ".join(sentence.split()[:8])
            yield line, f'a sentence begins with "{first[1]}": begin with its subject: {begin} ...'


def first_words(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, message) of every docstring, of an attribute too, that begins with one of `FIRST_WORDS`."""
    for statement in ast.walk(tree):
        value = statement.value if isinstance(statement, ast.Expr) else None
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            continue
        if first := re.match(rf"\W*({'|'.join(FIRST_WORDS)})\b", value.value):
            begin = " ".join(value.value.split()[:8])
            yield statement.lineno, f'a docstring begins with "{first[1]}": begin with a verb or a noun: {begin} ...'


def locals_by_origin(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yields (line, message) of every assignment of a variable that is named in `LOCALS`; fields don't count."""
    fields: set[ast.expr] = set()
    for node in ast.walk(tree):  # a class comes before its statements
        if isinstance(node, ast.ClassDef):
            for statement in node.body:
                fields.update(statement.targets if isinstance(statement, ast.Assign) else ())
                fields.update({statement.target} if isinstance(statement, ast.AnnAssign) else ())
        elif isinstance(node, ast.Name) and node.id in LOCALS and type(node.ctx) is ast.Store and node not in fields:
            yield node.lineno, f'a local is named "{node.id}": name it for its content'


def folder(path: str) -> str:
    """Returns the first two parts at most of the folder of a path in the repository; "." for a file of the root."""
    return "/".join(path.split("/")[:-1][:2]) or "."


def findings(path: Path) -> list[tuple[int, str]]:
    """Returns (line, message) of everything in a file that breaks a rule, except for long sentences."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return list(sentence_starts(text))
    tree = ast.parse(text)
    return [*first_words(tree), *locals_by_origin(tree)]


def check_length(name: str, path: Path) -> bool:
    """Prints the long sentences of a page that has more than `STILL_LONG` allows; returns True if it has."""
    allowed = STILL_LONG.get(name, 0)
    too_long = list(long_sentences(path.read_text(encoding="utf-8")))
    if len(too_long) <= allowed:
        return False
    for line, message in too_long:
        print(f"{name}:{line}: {message}")
    print(f"{name}: {len(too_long)} long sentences, {allowed} are allowed: cut them into short ones")
    return True


def main(names: list[str]) -> int:
    """Checks the files, or the whole repository; prints each finding and returns 1 if there are any."""
    whole = not names
    if whole:
        command = ["git", "-C", str(REPOSITORY), "ls-files", "*.py", "*.pyi", "*.md"]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        names = [name for name in listed if (REPOSITORY / name).is_file() and name != "CHANGELOG.md"]
    failed = False
    clean = set(NOT_CLEAN) if whole else set[str]()
    for name in names:
        path = (REPOSITORY / name) if whole else Path(name).resolve()
        if path.is_relative_to(REPOSITORY):
            name = str(path.relative_to(REPOSITORY))
        lines = findings(path)
        if folder(name) not in NOT_CLEAN:
            for line, message in lines:
                failed = True
                print(f"{name}:{line}: {message}")
        elif lines:
            clean.discard(folder(name))
        if path.suffix == ".md":
            failed |= check_length(name, path)
    for name in sorted(clean):
        print(f"{name} is clean: take it out of NOT_CLEAN in tests/plain_words.py")
    return 1 if failed or clean else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
