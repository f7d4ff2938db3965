"""Forms of answers: llguidance itself, without its processes and threads, so that one seed decides all that happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import cache, cached_property
from typing import Any

from enginewright.runtime.requests.structured import Grammar, Grammars, StructuredOutputsParams
from tests.runtime.requests.byte_tokens import byte_tokens_json

from .model import END, VOCAB, tokens_of

_WAYS = range(30)
_STEEP = "\n".join(
    (
        'start: (/[a-g]/ | "hh" way)+',
        "way: " + " | ".join(f"way{i}" for i in _WAYS),
        *(f'way{i}: "b" way{i} | "d"' for i in _WAYS),
    )
)
"""Letters; behind "hh" there are so many ways to go on that llguidance gives up, with the limit that it has here."""
_MOST_ITEMS = 60

FORMS = {
    "words": StructuredOutputsParams(choice=["abcab", "abd", "bcdbcd", "cc", "abcabcabcabc"]),
    "letters": StructuredOutputsParams(regex="[a-d]{3,12}"),
    "copy": StructuredOutputsParams(regex="(abcdefg){1,3}[a-g]{0,4}"),
    "json": StructuredOutputsParams(
        json={"type": "object", "properties": {"a": {"enum": ["b", "c"]}}, "required": ["a"]},
        disable_any_whitespace=True,
    ),
    "steep": StructuredOutputsParams(grammar=_STEEP),
    "digit": StructuredOutputsParams(regex="[a-g]|[a-g]{6}"),
}


class SimulatedGrammars(Grammars):
    """Grammars that take no thread. Masks are computed when they are asked for, or, where ``late`` says so, when
    somebody waits for them."""

    def __init__(self) -> None:
        super().__init__(byte_tokens_json((END,)), VOCAB, [END])
        self.late: Callable[[], bool] = lambda: False

    @cached_property
    def _matchers(self) -> dict[str, Any]:
        return {name: _matcher(self._tokens, one.source()) for name, one in FORMS.items()}

    def named(self, name: str) -> Grammar:
        """The grammar of one of ``FORMS``, at its beginning."""
        return Grammar(self, self._matchers[name].deep_copy(), FORMS[name].kind)

    @cached_property
    def _pool(self) -> Any:
        return _Inline()

    def submit(self, work: Callable[[], None]) -> Future[None]:
        future = _Late(work)
        if not self.late():
            future.result()
        return future


class _Inline:
    """An ``LLExecutor`` that uses no thread if there is no draft."""

    def __init__(self) -> None:
        from llguidance import LLExecutor

        self._with_drafts = LLExecutor(1)

    def unsafe_compute_mask_ptr(self, matchers: Sequence[tuple[Any, int]], to: int, size: int, rows: int) -> None:
        """Computes the masks one after the other."""
        for matcher, at in matchers:
            assert at < rows
            matcher.unsafe_compute_mask_ptr(to + at * size, size)

    def unsafe_compute_mask_ptr_with_draft_token(self, *arguments: Any) -> None:
        """Computes the masks in the library's own executor."""
        self._with_drafts.unsafe_compute_mask_ptr_with_draft_token(*arguments)


class _Late(Future[None]):
    """Does its work when its result is asked for."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self._work: Callable[[], None] | None = work

    def result(self, timeout: float | None = None) -> None:
        if self._work is not None:
            work, self._work = self._work, None
            work()


@cache
def simulated_grammars() -> SimulatedGrammars:
    """The grammars of this process: a form is compiled once."""
    return SimulatedGrammars()


def grammar(name: str) -> Grammar:
    """A form's grammar, at its beginning."""
    return simulated_grammars().named(name)


class Form:
    """A form as the reference follows it, without the product's code: which tokens may come next."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self) -> tuple[int, ...]:
        """The tokens that may come."""
        mask = self._matcher.compute_bitmask()
        return () if self._matcher.is_error() else tokens_of(bytes(mask))

    def after(self, token: int) -> Form:
        """The form behind one token more."""
        other = self._matcher.deep_copy()
        other.consume_token(token)
        return Form(other)


@cache
def form(name: str) -> Form:
    """A form at its beginning."""
    from llguidance import LLTokenizer

    return Form(_matcher(LLTokenizer(byte_tokens_json((END,)), n_vocab=VOCAB, eos_token=[END]), FORMS[name].source()))


def _matcher(tokens: Any, source: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokens, source, log_level=0, limits=LLParserLimits(max_items_in_row=_MOST_ITEMS))
    assert not matcher.get_error()
    return matcher
