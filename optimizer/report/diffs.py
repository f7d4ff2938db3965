"""The changes of passes to a program's text, layer by layer; layers with the same change are listed once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

_CONTEXT = 1
_MOST_WIDTH = 400
_SECTION_LINES = 200
_PASS_LINES = 600

_LAYER = re.compile(r"(?<=[A-Za-z_]\.)\d+(?![\w])")
"""A layer's number in a module path: model.layers.3.mlp."""

_NAME = re.compile(r"%[\w:/]+")
_CALL_LAYER = re.compile(r"(= ew\.attention\((?:[^,]+, ){4})\d+")
"""ew.attention(q, k, v, q_start, layer, ...)"""


@dataclass(frozen=True)
class DiffSection:
    """A unified diff of one layer's lines.

    Attributes:
        layer: its number; None for what belongs to no layer, such as the program's inputs.
        same_in: other layers where the pass did the same, but for names and numbers of layers.
        lines: of the diff, each beginning with ``+``, ``-``, a space or ``@@``.
        omitted: lines that were left out because there were too many.
    """

    layer: int | None
    same_in: tuple[int, ...]
    lines: tuple[str, ...]
    omitted: int = 0


@dataclass(frozen=True)
class ProgramDiff:
    """The changes of one run of a pass; ``number`` is its position among the passes, from 0."""

    number: int
    name: str
    added: int
    removed: int
    sections: tuple[DiffSection, ...]


class DiffRecorder:
    """Keeps the last text of a program, and what each pass changed in it.

    Texts are ``print_program(..., node_names=True)``.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, list[str]] = {}
        self.diffs: list[ProgramDiff] = []

    def start(self, text: str) -> None:
        """Tells the text that the next pass finds."""
        self._lines = _by_layer(text)

    def changed(self, number: int, name: str, text: str) -> None:
        """Tells the text after pass ``number``; one that is as before leaves no diff."""
        after = _by_layer(text)
        diff = _diff(number, name, self._lines, after)
        self._lines = after
        if diff.sections:
            self.diffs.append(diff)


def _by_layer(text: str) -> dict[int | None, list[str]]:
    """Lines by the layer of the first module that they name behind ``#``, or of the weight that they define."""
    layers: dict[int | None, list[str]] = {}
    for line in text.splitlines():
        subject = line.partition(" : ")[0] if line.startswith("weight") else line.rpartition("  # ")[2]
        where = subject if line.startswith("weight") or "  # " in line else ""
        layer = _LAYER.search(where)
        layers.setdefault(int(layer[0]) if layer else None, []).append(line)
    return layers


def _diff(
    number: int, name: str, before: dict[int | None, list[str]], after: dict[int | None, list[str]]
) -> ProgramDiff:
    added = removed = 0
    firsts: dict[str, tuple[int | None, list[str]]] = {}  # canonical text -> the first layer, its lines
    same: dict[str, list[int]] = {}
    layers = sorted({*before, *after}, key=lambda layer: -1 if layer is None else layer)
    for layer in layers:
        old, new = before.get(layer, []), after.get(layer, [])
        if old == new:
            continue
        lines = list(difflib.unified_diff(old, new, lineterm="", n=_CONTEXT))[2:]  # without the names of files
        added += sum(line.startswith("+") for line in lines)
        removed += sum(line.startswith("-") for line in lines)
        key = _canonical(lines, layer)
        if key in firsts and layer is not None:
            same[key].append(layer)
        else:
            firsts[key], same[key] = (layer, lines), []
    sections: list[DiffSection] = []
    left = _PASS_LINES
    for key, (layer, lines) in firsts.items():
        most = min(_SECTION_LINES, left)
        shown = tuple(_cut(line) for line in lines[:most])
        left -= len(shown)
        sections.append(DiffSection(layer, tuple(same[key]), shown, len(lines) - len(shown)))
    return ProgramDiff(number, name, added, removed, tuple(sections))


def _cut(line: str) -> str:
    return line if len(line) <= _MOST_WIDTH else line[: _MOST_WIDTH - 1] + "…"


def _canonical(lines: Sequence[str], layer: int | None) -> str:
    """The lines without what differs between layers: names by their order, numbers of layers from this one on."""
    names: dict[str, str] = {}

    def relative(match: re.Match[str]) -> str:
        return f"<{int(match[0]) - (layer or 0)}>"

    def rename(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"%{len(names)}")

    texts = []
    for line in lines:
        text = "@@" if line.startswith("@@") else _CALL_LAYER.sub(r"\1<layer>", line)
        texts.append(_NAME.sub(rename, _LAYER.sub(relative, text)))
    return "\n".join(texts)
