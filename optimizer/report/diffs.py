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
"""Matches the number of a layer in a module path: model.layers.3.mlp."""

_NAME = re.compile(r"%[\w:/]+")
_CALL_LAYER = re.compile(r"(= ew\.attention\((?:[^,]+, ){4})\d+")
"""Matches the number of the layer, the fifth argument of ``ew.attention``."""


@dataclass(frozen=True)
class DiffSection:
    """A unified diff of the lines of one layer.

    Attributes:
        layer: the number of the layer; None for lines outside layers, such as the program's inputs.
        same_in: other layers in which the pass made the same change, except for names and numbers of layers.
        lines: the lines of the diff, each beginning with ``+``, ``-``, a space or ``@@``.
        omitted: the number of lines that were left out.
    """

    layer: int | None
    same_in: tuple[int, ...]
    lines: tuple[str, ...]
    omitted: int = 0


@dataclass(frozen=True)
class ProgramDiff:
    """The changes by one run of a pass.

    Attributes:
        number: the position among the passes; the first is 0.
        name: the name of the pass.
        added, removed: the number of lines.
        sections: the changes by layer.
    """

    number: int
    name: str
    added: int
    removed: int
    sections: tuple[DiffSection, ...]


class DiffRecorder:
    """Records the changes of passes to a program's text.

    Texts are those of ``print_program(..., node_names=True)``.
    """

    def __init__(self) -> None:
        self._lines: dict[int | None, list[str]] = {}
        self.diffs: list[ProgramDiff] = []

    def start(self, text: str) -> None:
        """Sets the program's text before the next pass, with which the text after it is compared."""
        self._lines = _by_layer(text)

    def changed(self, number: int, name: str, text: str) -> None:
        """Records the text after pass ``number``; an unchanged text gives no diff."""
        after = _by_layer(text)
        diff = _diff(number, name, self._lines, after)
        self._lines = after
        if diff.sections:
            self.diffs.append(diff)


def _by_layer(text: str) -> dict[int | None, list[str]]:
    """Returns the lines by the layer of the first module after ``#``, or of the weight that a line defines."""
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
    """Returns lines without differences between layers: names are numbered, and numbers of layers are relative to
    ``layer``.
    """
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
