"""Reads turns from a terminal, and wraps text at its edge."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import unicodedata
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TextIO

# Unicode's pictures of control characters; those from 0x80 on have none.
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421, ord("\r"): ord("\n")} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


def read_turn(prompt: str, text: str = "") -> str | None:
    """Reads a turn after a prompt; pasted lines are one turn. Returns None at the end of input.

    It uses GNU readline, which comes with Python: nothing has to be installed, and editing and history work as in the
    user's other programs. If Python has libedit instead, or neither, lines that wait already belong to the first.

    Args:
        text: initial text after the prompt, which the user can edit.
    """
    readline = _readline()
    while True:
        try:
            if readline is not None and text:
                readline.set_startup_hook(lambda: readline.insert_text(text))
            typed = input(prompt)
            break
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends)", file=sys.stderr)
        finally:
            if readline is not None:
                readline.set_startup_hook(None)
    if readline is None or "libedit" in (readline.__doc__ or ""):
        while select.select([sys.stdin], [], [], 0)[0] and (more := sys.stdin.readline()):
            typed += "\n" + more.rstrip("\n")
    return typed


def _readline() -> ModuleType | None:
    try:
        import readline
    except ImportError:  # a Python that was built without
        return None
    if "libedit" not in (readline.__doc__ or ""):
        readline.parse_and_bind("set enable-bracketed-paste on")  # which Python switches off
    return readline


class Wrapped:
    """Writes pieces of text, with line breaks between words at the terminal's edge.

    The last word is held back until it is complete. Words longer than a line and spaces at the beginning of lines are
    unchanged.

    Args:
        write: writes a text.
        width: returns the terminal's columns; called for each word, as they may change.
    """

    def __init__(self, write: Callable[[str], object], width: Callable[[], int]) -> None:
        self._write, self._width = write, width
        self._column = 0
        self._space = self._word = ""

    def write(self, text: str) -> None:
        for character in text:
            if character == "\n":
                self.flush()
                self._write("\n")
                self._column = 0
            elif character.isspace():
                self._end_word()
                self._space += character
            elif _columns(character) == 2:  # scripts without spaces break anywhere
                self._end_word()
                self._word = character
                self._end_word()
            else:
                self._word += character

    def flush(self) -> None:
        """Writes the last word and space, which were held back."""
        self._end_word()
        self._write(self._space)
        self._column += _columns(self._space)
        self._space = ""

    def _end_word(self) -> None:
        if not self._word:
            return
        needed, space = _columns(self._word), _columns(self._space)
        if self._column > 0 and needed <= self._width() < self._column + space + needed:
            self._write("\n" + self._word)
            self._column = needed
        else:
            self._write(self._space + self._word)
            self._column += space + needed
        self._space = self._word = ""


def shown(text: str, stream: TextIO) -> str:
    """Returns a model's text for a stream. For a terminal, control characters are replaced by visible symbols.

    On a terminal they could move the cursor or run commands. Files and pipes get the text unchanged.
    """
    return text.replace("\r\n", "\n").translate(_PICTURES) if stream.isatty() else text


def terminal_width(stream: TextIO) -> int:
    """Returns the columns of the terminal that ``stream`` writes to; a large number if it isn't a terminal."""
    with contextlib.suppress(OSError, ValueError):
        return os.get_terminal_size(stream.fileno()).columns or 10**9
    return 10**9


def _columns(text: str) -> int:
    return sum(_widths(text))


def _widths(text: str) -> Iterator[int]:
    for character in text:
        if unicodedata.east_asian_width(character) in "WF":
            yield 2
        else:
            yield 0 if unicodedata.combining(character) or character == "\u200d" else 1
