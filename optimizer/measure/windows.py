"""Cuts a long text into windows that overlap, so that every token is scored once, and with context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer

DEFAULT_WINDOW = 512


@dataclass(frozen=True)
class Window:
    """Tokens ``start`` to ``stop`` of a text, of which those from ``first`` on are scored."""

    start: int
    stop: int
    first: int


@dataclass(frozen=True)
class Windows:
    """The division of a text into windows: the procedure of transformers' guide "Perplexity of fixed-length models".

    Window i has the text's tokens from i * ``stride`` on, and scores those that no earlier window had. So every token
    is scored once, and has at least ``size - stride`` tokens of context after the first window. The first token of a
    text is scored only if ``prefix`` precedes it.

    Attributes:
        size: most text tokens of a window, without the prefix.
        stride: tokens between the starts of two windows; less than ``size`` if there is no prefix, as some tokens would
            have no context otherwise.
        prefix: tokens that the model expects before any text (a BOS); every window begins with them.
    """

    size: int
    stride: int
    prefix: tuple[int, ...] = ()

    def count(self, tokens: int) -> int:
        """The number of windows of a text with ``tokens`` tokens."""
        return 1 + max(0, -(-(tokens - self.size) // self.stride))

    def cut(self, tokens: int) -> Iterator[Window]:
        """The windows of a text of so many tokens, in order."""
        done = 0 if self.prefix else 1
        for i in range(self.count(tokens)):
            stop = min(i * self.stride + self.size, tokens)
            yield Window(i * self.stride, stop, done)
            done = stop

    def steps(self, ids: Sequence[int]) -> Iterator[tuple[list[int], slice, Sequence[int]]]:
        """Yields for each window its tokens, the rows of their logits that count, and the tokens that these predict."""
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
    """Returns the indices of ``count`` windows, spread over a text of ``available``; all where it has fewer."""
    count = min(count, available)
    return [i * available // count for i in range(count)]


def split_prefix(tokenizer: Tokenizer, text: str) -> tuple[tuple[int, ...], list[int]]:
    """The tokens that the model expects before any text, and the tokens of ``text`` itself.

    What the tokenizer puts behind a text (an EOS) is left out: the text goes on.
    """
    bare = tokenizer.encode(text, add_special_tokens=False)
    whole = tokenizer.encode(text)
    for i in range(len(whole) - len(bare) + 1):
        if whole[i : i + len(bare)] == bare:
            return tuple(whole[:i]), bare
    return (), bare
