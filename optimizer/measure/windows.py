"""Cuts a long text into overlapping windows, so that every token is scored once, with context before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

DEFAULT_WINDOW = 512


@dataclass(frozen=True)
class Window:
    """A window of a text: its tokens are ``start`` to ``stop`` (exclusive), and those from ``first`` on are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Windows:
    """A division of a text into overlapping windows, as in transformers' guide "Perplexity of fixed-length models".

    Window i begins at token i * ``stride`` and scores the tokens that no earlier window contains. So every token is
    scored once; after the first window, it has at least ``size - stride`` tokens of context. The first token of a text
    is scored only if there is a ``prefix``.

    Attributes:
        size: the most text tokens of a window, without the prefix.
        stride: tokens between the starts of two windows. Without a prefix it must be less than ``size``, as otherwise
            some tokens would have no context.
        prefix: tokens that the model expects before any text (a BOS); every window begins with them.
    """

    size: int
    stride: int
    prefix: tuple[int, ...] = ()

    def count(self, tokens: int) -> int:
        """Returns the number of windows of a text of ``tokens`` tokens."""
        return 1 + max(0, -(-(tokens - self.size) // self.stride))

    def cut(self, tokens: int) -> Iterator[Window]:
        """Yields the windows of a text of ``tokens`` tokens, in order."""
        done = 0 if self.prefix else 1
        for i in range(self.count(tokens)):
            stop = min(i * self.stride + self.size, tokens)
            yield Window(i * self.stride, stop, done)
            done = stop

    def steps(self, ids: Sequence[int]) -> Iterator[tuple[list[int], slice, Sequence[int]]]:
        """Yields for each window its tokens, the slice of logit rows that are scored, and the tokens that those rows
        predict.
        """
        for window in self.cut(len(ids)):
            tokens = [*self.prefix, *ids[window.start : window.stop]]
            before = len(self.prefix) - window.start - 1  # row i is of the token behind it
            yield tokens, slice(window.first + before, window.stop + before), ids[window.first : window.stop]


def plan_windows(window: int | None, stride: int | None, context: int, prefix: tuple[int, ...]) -> Windows:
    """Returns the windows in which a text is evaluated: sequences of ``window`` tokens, each beginning with the prefix.

    Args:
        window: tokens of a window, with its prefix; None takes 512, or the context if it is shorter.
        stride: tokens between the starts of two windows; None takes half of the window.
        context: the most tokens that the models can read.
        prefix: token ids at the beginning of each window, as in `Windows`.

    Raises RequestError naming ``window`` or ``stride`` if it is out of range.
    """
    least = max(len(prefix), 1) + 1
    if window is None:
        window = max(min(DEFAULT_WINDOW, context), least)
    if not least <= window <= context:
        raise RequestError(
            f"window: {window} is out of range", hint=f"It must be an integer from {least} to {context}, the context."
        )
    most = window - max(len(prefix), 1)
    if stride is None:
        stride = min(max(window // 2, 1), most)
    if not 1 <= stride <= most:
        raise RequestError(
            f"stride: {stride} is out of range",
            hint=f"It must be an integer from 1 to {most}, so that every token has some context.",
        )
    return Windows(window - len(prefix), stride, prefix)


def spread(count: int, available: int) -> list[int]:
    """Returns ``count`` evenly spaced indices out of ``available`` windows; all of them if there are fewer."""
    count = min(count, available)
    return [i * available // count for i in range(count)]


def split_prefix(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], list[int]]:
    """Returns the tokens that the model expects before any text (such as a BOS), and the tokens of ``text``.

    Tokens that the tokenizer appends to a text (an EOS) are left out, because the text continues in the next window.
    """
    bare = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    for i in range(len(whole) - len(bare) + 1):
        if whole[i : i + len(bare)] == bare:
            return tuple(whole[:i]), bare
    return (), bare
