"""Structured output: answers in the form that a schema, a pattern or a grammar allows.

llguidance (https://github.com/guidance-ai/llguidance, the extra ``structured``) computes which tokens are allowed next.
It is imported for the first such request. When it fails, its mask allows the end token; so errors are checked before
each mask is used, and a failed grammar never lets an incomplete answer pass.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..shared.counters import Counters
from ..shared.errors import (
    CapacityError,
    EnginewrightError,
    MissingDependencyError,
    OverloadError,
    RequestError,
    meant,
    shown,
)
from ..shared.json_document import JSON_GUIDANCE, JSON_WHITESPACE
from ..shared.json_schema import hold_schema
from ..shared.shares import Shares
from ..shared.threads import available_threads

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor

T = TypeVar("T")

MOST_BYTES = 1 << 20
"""The most bytes of a schema, a pattern, a grammar or all choices."""
MOST_CHOICES = 10_000
MOST_DEPTH = 100
"""The most levels of a schema's objects and arrays."""
COMPILE_SECONDS = 5.0
"""The most processor time of a compilation, in seconds."""
KEPT_BYTES = 128 << 20
"""The most bytes of compiled grammars that are kept for later requests."""
RUNNING_BYTES = 192 << 20
"""The most bytes of compiled grammars of running requests and for later requests together."""
_NESTED = 64  # levels of a pattern's groups
KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """The form of an answer. Exactly one of the first six fields must be set. The names are vLLM's.

    Attributes:
        json: a JSON schema, as a mapping or as text, or a pydantic model.
        regex: a regular expression that the whole answer matches, in the dialect of Rust's regex crate.
        choice: a list of texts; the answer is one of them.
        grammar: a Lark grammar, in llguidance's dialect (its docs/syntax.md).
        json_object: True allows any JSON object.
        structural_tag: JSON text {"structures": [{"begin", "schema", "end"}], "triggers": [...]}. After a trigger
            occurs, the answer must continue with a structure whose ``begin`` starts with the trigger. The answer then
            has the rest of ``begin``, JSON that follows ``schema``, and ``end``. Other text isn't restricted.
        disable_any_whitespace: True if JSON has no whitespace between its tokens.
        whitespace_pattern: a regular expression for the whitespace between JSON tokens. By default it is a space, or
            a line break with an indentation.

    Raises:
        RequestError: none or several of the six fields are set, or a value is invalid; the message names the field.
    """

    json: str | Mapping[str, Any] | type | bool | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        if self.json_object is False:
            object.__setattr__(self, "json_object", None)
        names = [name for name in KINDS if getattr(self, name) is not None]
        if len(names) != 1:
            problem = "none is given" if not names else f"{' and '.join(names)} are given"
            raise RequestError(f"structured_outputs: {problem}", hint=f"Give exactly one of {', '.join(KINDS)}.")
        if self.json is not None:
            object.__setattr__(self, "json", _schema_text(self.json))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        self._check_types()
        if self.structural_tag is not None:
            _tags(self.structural_tag)
        for name in ("json", "regex", "choice", "grammar", "structural_tag"):
            value = getattr(self, name)
            size = 0 if value is None else sum(map(_bytes, (value,) if isinstance(value, str) else value))
            if size > MOST_BYTES:
                raise _wrong(name, f"{size:,} bytes", f"{MOST_BYTES:,} at most are taken.")

    def _check_types(self) -> None:
        """Checks the fields that are texts or booleans. Raises RequestError."""
        for name in ("regex", "grammar", "structural_tag", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _wrong(name, value, "Pass text.")
        if self.json_object not in (None, True):
            raise _wrong("json_object", self.json_object, "Pass True.")
        if not isinstance(self.disable_any_whitespace, bool):
            raise _wrong("disable_any_whitespace", self.disable_any_whitespace, "Pass True or False.")

    @classmethod
    def checked(cls, value: Any) -> StructuredOutputsParams | None:
        """Converts a caller's value: an object of this class, a mapping of its fields, or None. Raises
        RequestError.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping):
            raise _wrong("", value, "Pass StructuredOutputsParams(json=...), or a mapping of its fields.")
        known = {one.name for one in fields(cls)}
        for name in value:
            if name not in known:
                hint = f"{meant(name, known)}It has {', '.join(sorted(known))}."
                raise RequestError(f"structured_outputs: there is no {shown(name)}", hint=hint)
        return cls(**value)

    @classmethod
    def restored(cls, values: Mapping[str, Any]) -> StructuredOutputsParams:
        """Returns an object from the plain values of all fields, as a socket transfers them. The sender has checked
        them.
        """
        copy = object.__new__(cls)
        copy.__dict__.update(
            {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        )
        return copy

    @property
    def kind(self) -> str:
        """The name of the field of ``KINDS`` that is set."""
        return next(name for name in KINDS if getattr(self, name) is not None)

    def to_plain(self) -> dict[str, Any]:
        """Returns the fields that are set, as JSON values."""
        return {
            one.name: list(value) if isinstance(value, tuple) else value
            for one in fields(self)
            if (value := getattr(self, one.name)) not in (None, False)
        }

    def source(self) -> str:
        """Returns the form as a grammar for llguidance. Raises RequestError."""
        from llguidance import LLMatcher

        if self.json is not None or self.json_object:
            options: dict[str, Any] = {"lenient": False, "coerce_one_of": False}  # whatever the schema says of these
            if self.disable_any_whitespace:
                options["whitespace_flexible"] = False
            else:
                options["whitespace_pattern"] = self.whitespace_pattern or JSON_WHITESPACE
            schema = _held_text(self.json) if isinstance(self.json, str) else '{"type": "object"}'
            try:
                return str(LLMatcher.grammar_from_json_schema(schema, overrides=options))  # type: ignore[arg-type]
            except ValueError as e:  # such as a number that no float has
                raise RequestError(f"structured_outputs.json: {shown(str(e), 300)}", hint="Pass another schema.") from e
        if self.regex is not None:
            return str(LLMatcher.grammar_from_regex(self.regex))
        if self.choice is not None:
            return str(LLMatcher.grammar_from_regex(_pattern(sorted(set(self.choice)))))
        if self.structural_tag is not None:
            return _tags(self.structural_tag)
        assert self.grammar is not None
        return str(LLMatcher.grammar_from_lark(self.grammar))


def _wrong(name: str, value: object, hint: str) -> RequestError:
    place = f".{name}" if name else ""
    text = value if isinstance(value, str) and name else shown(value)
    return RequestError(f"structured_outputs{place}: {text} isn't taken", hint=hint)


def _bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as e:
        raise RequestError("structured_outputs: its text has lone surrogates", hint="Send text in UTF-8.") from e


def _schema_text(source: Any) -> str:
    """Returns a JSON schema as text. Raises RequestError if the source isn't a valid schema."""
    make = getattr(source, "model_json_schema", None)
    if callable(make):  # a pydantic model
        source = make()
    try:
        schema = json.loads(source) if isinstance(source, str) else source
        depth = _depth(schema)
        text = source if isinstance(source, str) else json.dumps(schema)
    except (ValueError, TypeError, RecursionError) as e:
        raise RequestError(f"structured_outputs.json: {shown(source)} isn't JSON: {e}", hint="Pass a schema.") from e
    if not isinstance(schema, (dict, bool)):
        raise _wrong("json", schema, "A JSON schema is an object, true or false.")
    if isinstance(schema, bool):
        if not schema:
            raise RequestError("structured_outputs.json: nothing can meet the schema false", hint="Pass another.")
        return "{}"
    if depth > MOST_DEPTH:
        raise _wrong("json", f"a schema {depth} levels deep", f"{MOST_DEPTH} at most are taken.")
    return text


def _depth(value: Any) -> int:
    deepest, left = 0, [(value, 1)]
    while left:
        one, depth = left.pop()
        inner = one.values() if isinstance(one, Mapping) else one if isinstance(one, (list, tuple)) else ()
        left += [(each, depth + 1) for each in inner]
        deepest = max(deepest, depth)
        if deepest > MOST_DEPTH:
            break
    return deepest


def _held_text(schema: str) -> str:
    """Returns the schema that answers must follow, as text.

    Raises RequestError naming a keyword that can't be enforced.
    """
    held = hold_schema(json.loads(schema), "structured_outputs.json", lenient=False).schema
    return json.dumps({} if held is True else held)


def _bounded(schema: str) -> str:
    """Returns the schema of a structural tag as text, with llguidance's options for whitespace added."""
    held = hold_schema(json.loads(schema), "structured_outputs.structural_tag").schema
    return json.dumps({**({} if isinstance(held, bool) else held), "x-guidance": JSON_GUIDANCE})


def _pattern(texts: Sequence[str], begin: int = 0, level: int = 0) -> str:
    """Returns a pattern that matches any of ``texts``, from index ``begin`` on. Common prefixes are factored out.

    The texts must be sorted and equal up to ``begin``. Without factoring, a parser couldn't follow ten thousand
    alternatives. ``level`` is the depth of the recursion.
    """
    first, last = texts[0], texts[-1]
    end = begin
    while end < min(len(first), len(last)) and first[end] == last[end]:
        end += 1
    if len(texts) == 1:
        return _literal(first[begin:])
    alternatives, at = [], int(len(first) == end)
    ends_here = at
    if level == _NESTED:
        alternatives = [_literal(text[end:]) for text in texts[at:]]
        at = len(texts)
    while at < len(texts):
        after = at + 1
        while after < len(texts) and texts[after][end] == texts[at][end]:
            after += 1
        alternatives.append(_pattern(texts[at:after], end, level + 1))
        at = after
    return f"{_literal(first[begin:end])}(?:{'|'.join(alternatives)}){'?' if ends_here else ''}"


def _literal(text: str) -> str:
    return "".join(c if c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _choices(choice: Any) -> tuple[str, ...]:
    """Returns the texts of ``choice``. Raises RequestError if they aren't non-empty texts, or are too many."""
    listed = not isinstance(choice, str) and isinstance(choice, Sequence) and len(choice) > 0
    if not listed or not all(isinstance(one, str) and one for one in choice):
        raise _wrong("choice", choice, "Pass a list of texts, none of them empty.")
    if len(choice) > MOST_CHOICES:
        raise _wrong("choice", f"{len(choice)} texts", f"Pass {MOST_CHOICES:,} at most.")
    return tuple(choice)


def _tags(text: str) -> str:
    """Converts vLLM's structural tags, as JSON text, to a grammar. Raises RequestError."""
    hint = 'Pass {"structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]} as JSON text.'
    try:
        document = json.loads(text)
        structures, triggers = document["structures"], document["triggers"]
        parts = [(one["begin"], one.get("schema", {}), one["end"]) for one in structures]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise RequestError(f"structured_outputs.structural_tag: {shown(e)}", hint=hint) from e
    if not parts or not all(isinstance(one, str) and one for one in triggers):
        raise RequestError("structured_outputs.structural_tag: there is no structure, or an empty trigger", hint=hint)
    lines, names = ["%llguidance {}"], []
    for i, (begin, schema, end) in enumerate(parts):
        trigger = next((one for one in triggers if isinstance(begin, str) and begin.startswith(one)), None)
        if trigger is None or not isinstance(end, str):
            raise RequestError(
                f"structured_outputs.structural_tag: structures[{i}].begin starts with none of the triggers", hint=hint
            )
        names.append(f"tag_{i}")
        rest = "".join(f" {json.dumps(part, ensure_ascii=False)}" for part in (begin[len(trigger) :],) if part)
        after = f" {json.dumps(end, ensure_ascii=False)}" if end else ""
        lines.append(f"trigger_{i}[lazy]: /(?s:.*)/ {json.dumps(trigger, ensure_ascii=False)}")
        lines.append(f"tag_{i}: trigger_{i}{rest} %json {_bounded(_schema_text(schema))}{after}")
    lines.append(f"start: ({' | '.join(names)})* /(?s:.*)/")
    return "\n".join(lines)


class Grammar:
    """The state of a grammar for one answer, which determines the tokens that are allowed next.

    Attributes:
        error: the error after which no token is allowed; None while the grammar works.
    """

    def __init__(self, grammars: Grammars, matcher: Any, kind: str, compiled: Compiled | None = None) -> None:
        self._grammars, self._matcher, self._kind = grammars, matcher, kind
        self._compiled = compiled  # counts as long as an answer follows it
        self.error: EnginewrightError | None = None

    def copy(self) -> Grammar:
        """Returns a copy in the same state."""
        other = Grammar(self._grammars, self._matcher.deep_copy(), self._kind, self._compiled)
        other.error = self.error
        return other

    @property
    def complete(self) -> bool:
        """True if the answer may end after the tokens so far."""
        return self.error is None and bool(self._matcher.is_accepting())

    def push(self, token: int) -> None:
        """Advances the state by a token of the answer."""
        if self.error is None and not self._matcher.consume_token(token):
            self.check()

    def forced(self, most: int) -> Sequence[int]:
        """Returns up to ``most`` next tokens that the grammar forces; empty if it allows several texts."""
        if self.error is not None:
            return ()
        matcher = self._matcher.deep_copy()  # which keeps an error that this brings up: it costs the proposal alone
        tokens: list[int] = matcher.compute_ff_tokens()
        if not tokens and matcher.is_stopped() and not matcher.is_error():
            return self._grammars.only_end[:most]
        return tokens[:most]

    def check(self) -> None:
        """Sets ``error`` if llguidance has failed."""
        if self.error is None and self._matcher.is_error():
            self.fail(str(self._matcher.get_error()).partition("\n")[0])

    def fail(self, said: str) -> None:
        """Sets ``error`` to an error with the message ``said``, unless there is one already."""
        if self.error is None:
            self.error = RequestError(
                f"structured_outputs.{self._kind}: the answer can't be followed any more, and isn't complete: {said}",
                hint="Make the schema or grammar simpler. Other requests went on.",
            )


class Compiled:
    """A compiled grammar in its initial state, and the bytes of memory that it takes."""

    def __init__(self, matcher: Any, size: int) -> None:
        self.matcher, self.bytes = matcher, size


class Guided(NamedTuple):
    """The rows of a step that one grammar limits: ``row``, then a row for each token of the draft."""

    grammar: Grammar
    row: int
    draft: Sequence[int]


class Masks:
    """The masks of allowed tokens for a step's rows. Another thread computes them; ``wait`` waits for it.

    Attributes:
        rows: [R], the index of each row's mask; -1 for none.
        bits: [masks, ceil(V / 32)] uint32, one bit per token.
    """

    def __init__(self, guided: Sequence[Guided], rows: int) -> None:
        grammars = guided[0].grammar._grammars
        self.rows = np.full(rows, -1, np.int32)
        count = 0
        places = []
        for one in guided:
            size = 1 + len(one.draft)
            self.rows[one.row : one.row + size] = np.arange(count, count + size)
            places.append((one.grammar, count, list(one.draft)))
            count += size
        # A row that isn't filled in is behind a token of a draft that may not come: nobody takes what it draws.
        self.bits: npt.NDArray[np.uint32] = np.full((count, grammars.words), 0xFFFFFFFF, np.uint32)
        self._work: Future[None] = grammars.submit(partial(grammars.fill, places, self.bits))

    def wait(self) -> None:
        """Waits until the masks are computed. Raises the error of the thread."""
        self._work.result()

    def chosen(self, rows: npt.NDArray[np.int64]) -> Masks:
        """Returns the masks of the rows with these indices, in that order."""
        return self._with_rows(self.rows[rows])

    def longer(self, more: int) -> Masks:
        """Returns the masks with ``more`` additional rows, which have no mask."""
        return self._with_rows(np.concatenate([self.rows, np.full(more, -1, np.int32)]))

    def _with_rows(self, rows: npt.NDArray[np.int32]) -> Masks:
        other = copy(self)
        other.rows = rows
        return other

    def lists(self) -> list[npt.NDArray[np.int32]]:
        """Waits for the masks, and returns the allowed token ids of each mask."""
        self.wait()
        bits = np.unpackbits(self.bits.view(np.uint8), axis=1, bitorder="little")
        return [np.flatnonzero(row).astype(np.int32) for row in bits]


class Grammars:
    """Compiles grammars for one model's tokens, and computes masks, on its own threads.

    A compilation can't be interrupted. So another process compiles a grammar on trial first, at a low priority and
    within limits of time and memory, and reports the memory it takes. Compiled grammars are cached within a budget of
    bytes; the tenant whose grammars take the most bytes loses its oldest grammars first.

    Args:
        tokenizer: the text of the model's tokenizer.json (``Tokenizer.to_json``).
        vocab_size: the number of logits.
        end_tokens: tokens that end an answer.
        seconds: the limit of processor time for a compilation.
        counters: counts drafts that were dropped.

    Raises:
        RequestError: the model has no token that ends an answer.
    """

    def __init__(
        self,
        tokenizer: str,
        vocab_size: int,
        end_tokens: Sequence[int],
        seconds: float = COMPILE_SECONDS,
        counters: Counters | None = None,
    ) -> None:
        self._text = tokenizer
        self._vocab_size, self._ends = vocab_size, [token for token in end_tokens if token < vocab_size]
        if not self._ends:
            raise RequestError(
                "structured_outputs: the model has no token that ends an answer", hint="Leave structured_outputs out."
            )
        self.only_end = tuple(self._ends) if len(self._ends) == 1 else ()
        self.words = (vocab_size + 31) // 32
        self._kept: Shares[tuple[str, str], Compiled] = Shares(KEPT_BYTES)
        self._alive: weakref.WeakSet[Compiled] = weakref.WeakSet()
        self._counters = counters or Counters()
        self._lock = threading.Lock()
        self._compilers: ThreadPoolExecutor | None = None
        from .grammar_process import GrammarProcess

        self._process = GrammarProcess(self._text, vocab_size, self._ends, seconds)

    @cached_property
    def _tokens(self) -> Any:
        from llguidance import LLTokenizer

        return LLTokenizer(self._text, n_vocab=self._vocab_size, eos_token=self._ends)

    @cached_property
    def _workers(self) -> ThreadPoolExecutor:
        from concurrent.futures import ThreadPoolExecutor  # 10 ms that other requests don't wait for

        return ThreadPoolExecutor(1, "masks")

    @cached_property
    def _pool(self) -> Any:
        from llguidance import LLExecutor

        return LLExecutor(max(1, available_threads() // 2))

    def grammar(self, params: StructuredOutputsParams, tenant: str = "") -> Grammar:
        """Returns a grammar in its initial state, compiled or from the cache. It runs in the caller's thread, not the
        engine's.

        Raises:
            RequestError: no answer can have this form, or it isn't supported, or compiling takes too much time or
                memory.
            OverloadError: the grammar is slow to compile and others wait, or the grammars of running requests take too
                much memory.
            MissingDependencyError: llguidance isn't installed.
        """
        with MissingDependencyError.of(("llguidance",), "structured_outputs", "structured"):
            source = params.source()
        key = params.kind, source
        compiled = self._kept.get(key)
        if compiled is None:
            self._check_failure(params.kind, source)
            owner = tenant.partition("\0")[0]
            with self._process.turns.turn(owner):
                compiled = self._kept.get(key) or self._compiled(params.kind, source, owner)
                self._kept.put(key, compiled, owner, compiled.bytes)
        return Grammar(self, compiled.matcher.deep_copy(), params.kind, compiled)

    def _check_failure(self, kind: str, source: str) -> None:
        if (problem := self._process.failure(source)) is not None:
            raise _refused(kind, problem)

    def _compiled(self, kind: str, source: str, owner: str) -> Compiled:
        from llguidance import LLMatcher

        from .grammar_process import limits

        self._check_failure(kind, source)
        # The first time, both processes read the tokenizer, at the same time.
        reading = None if "_tokens" in vars(self) else self._niced(lambda: self._tokens)
        problem, size = self._process.attempt(source, owner)
        if problem is not None:
            raise _refused(kind, problem)
        if (held := sum(one.bytes for one in list(self._alive))) + size > RUNNING_BYTES:
            raise OverloadError(
                f"structured_outputs: grammars of running requests take {held >> 20} MiB already", retry_after=5.0
            )
        tokens = self._tokens if reading is None else reading.result()
        matcher = self._niced(lambda: LLMatcher(tokens, source, log_level=0, limits=limits(10))).result()
        if problem := str(matcher.get_error()):
            raise _refused(kind, problem)
        compiled = Compiled(matcher, size)
        self._alive.add(compiled)
        return compiled

    def _niced(self, make: Callable[[], T]) -> Future[T]:
        """Calls ``make`` on a thread of low priority, so that steps have the cores first."""
        with self._lock:
            if self._compilers is None:
                from concurrent.futures import ThreadPoolExecutor

                from .grammar_process import AT_ONCE

                self._compilers = ThreadPoolExecutor(AT_ONCE, "grammars", _be_nice)
        return self._compilers.submit(make)

    def submit(self, work: Callable[[], None]) -> Future[None]:
        """Calls ``work`` on the thread for masks, after earlier calls. Raises CapacityError if the thread can't
        start.
        """
        try:
            return self._workers.submit(work)
        except RuntimeError as e:
            raise CapacityError(f"a thread for masks can't be started: {e}") from e

    def fill(self, places: Sequence[tuple[Grammar, int, list[int]]], bits: npt.NDArray[np.uint32]) -> None:
        """Computes masks into ``bits``; for a grammar that failed, all tokens are banned.

        An error that a token causes stays in llguidance's matcher, and a draft may contain any token. So the masks of a
        draft are computed on a copy of the matcher. After an error of the copy, the masks after each token of the draft
        ban all tokens; the grammar and its own mask stay valid.

        Args:
            places: (grammar, index of its mask in ``bits``, draft). The masks of the draft's tokens follow the
                grammar's.
            bits: [masks, ceil(V / 32)], the result: a bit for each token, set if the token is allowed.
        """
        sound = [place for place in places if place[0].error is None]
        drafted = [(grammar._matcher.deep_copy(), at, draft) for grammar, at, draft in sound if draft]
        to = bits.ctypes.data, self.words * 4, len(bits)
        problems = _problems(self._pool.unsafe_compute_mask_ptr_with_draft_token, drafted, to)
        for (matcher, at, draft), problem in zip(drafted, problems, strict=True):
            if problem is not None or matcher.is_error():
                bits[at + 1 : at + 1 + len(draft)] = 0
                why = EnginewrightError(problem or str(matcher.get_error()).partition("\n")[0])
                self._counters.caught("masks of drafts", "fill", why)
        plain = [(grammar._matcher, at) for grammar, at, _ in sound]
        for (grammar, _, _), problem in zip(
            sound, _problems(self._pool.unsafe_compute_mask_ptr, plain, to), strict=True
        ):
            if problem is not None:
                grammar.fail(problem)
        for grammar, at, draft in places:
            grammar.check()
            if grammar.error is not None:
                bits[at : at + 1 + len(draft)] = 0

    def close(self) -> None:
        """Ends the process and the threads."""
        self._process.close()
        if "_workers" in self.__dict__:
            self._workers.shutdown(wait=True)
        if self._compilers is not None:
            self._compilers.shutdown(wait=False, cancel_futures=True)


def _problems(compute: Callable[..., None], work: Sequence[Any], to: tuple[int, int, int]) -> list[str | None]:
    """Calls ``compute(work, *to)``; if that raises, calls it for each entry alone.

    Returns each entry's error, or None.
    """
    problems: list[str | None] = [None] * len(work)
    try:
        if work:
            compute(work, *to)
    except Exception:  # noqa: BLE001  whose it is shows when each is computed alone
        for i, one in enumerate(work):
            try:
                compute([one], *to)
            except Exception as e:  # noqa: BLE001  the others go on
                problems[i] = shown(e, 200)
    return problems


def _be_nice() -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)  # of this thread alone, on Linux


def _refused(kind: str, problem: str) -> RequestError:
    return RequestError(
        f"structured_outputs.{kind}: {_plainly(problem)}",
        hint="Leave that out of the schema or grammar, or say it in another way.",
    )


def _plainly(problem: str) -> str:
    """Returns the first line of an error message of llguidance, at most 400 characters. It names the wrong keyword."""
    lines = [line.strip() for line in problem.strip().splitlines() if line.strip()]
    first = re.sub(r"^at \d+\(\d+\): ", "", lines[0]) if lines else "it can't be compiled"
    if first.endswith("regex parse error:"):
        first = f"{first} {next((line for line in lines if line.startswith('error:')), '')}"
    return first if len(first) <= 400 else first[:400] + "..."
