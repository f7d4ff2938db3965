"""Typed errors. Every error a user can cause names the file, field or flag, and says what to do."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import MappingProxyType
from typing import Any, Self


def shown(value: object, most: int = 80) -> str:
    """Returns a value's repr for a message, cut to ``most`` characters. Never raises, whatever the value's
    methods do.
    """
    try:
        if isinstance(value, (str, bytes, bytearray)):
            value = value[: most + 1]
        text = repr(value)
        return text if len(text) <= most else f"{text[: most - 3]}..."
    except Exception:  # noqa: BLE001  an integer of 5,000 digits, or a class of the caller's
        return f"<{type(value).__name__}>"


def plural(noun: str, number: int) -> str:
    """Returns an English noun in the number for ``number`` things: "token" for 1, otherwise "tokens"."""
    return noun if number == 1 else f"{noun}s"


def counted(number: int, noun: str) -> str:
    """Returns a number with its noun: "1 token", "1,024 tokens"."""
    return f"{number:,} {plural(noun, number)}"


def field_first(problem: str, whole: str) -> str:
    """Returns a message of msgspec about a wrong value, reordered to begin with the field.

    An example is "max_tokens: expected `int`, got `str`".

    Args:
        problem: msgspec's message.
        whole: the name of the parsed document, which stands in for the field if the message names none.
    """
    message, _, place = problem.partition(" - at `$")
    return f"{place.rstrip('`').lstrip('.') or whole}: {message[0].lower()}{message[1:]}"


def meant(name: object, known: Iterable[str]) -> str:
    """Returns the beginning of a hint, "Did you mean NAME? ", if one of the ``known`` names is similar to ``name``;
    else "".

    A name of more than 64 characters isn't compared.
    """
    near = difflib.get_close_matches(name, known, 1) if isinstance(name, str) and len(name) <= 64 else []
    return f"Did you mean {near[0]}? " if near else ""


def meant_in(fields: Iterable[str], *missing: str) -> str:
    """Returns the beginning of a hint, "Did you mean FIELD by NAME? ", if a field has nearly the missing name;
    otherwise "".

    Args:
        fields: the names that the document has.
        missing: the name that is missing; or several names, of which the document needs one.
    """
    for name in fields:
        if name not in missing and (near := difflib.get_close_matches(name[:64], missing, 1)):
            return f"Did you mean {near[0]} by {name[:64]}? "
    return ""


class EnginewrightError(Exception):
    """The base class of all errors that Enginewright raises on purpose.

    Args:
        message: the problem, with the name of the file, field or flag.
        hint: a sentence about the remedy, which is printed below the message.

    ``exit_code`` is the exit code of ``optimize``, which docs/use/cli.md lists.
    """

    exit_code = 1

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  {self.hint}" if self.hint else self.message

    def reworded(self, message: str, *, hint: str | None) -> Self:
        """Returns an error of the same class and attributes with another message and hint."""
        return self.restored(message, hint, vars(self))

    @classmethod
    def restored(cls, message: str, hint: str | None, attributes: Mapping[str, Any]) -> Self:
        """Returns an error of this class with these attributes, without running ``__init__``.

        It restores an error that another process sent.
        """
        error = cls.__new__(cls, message)
        error.__dict__.update(attributes, message=message, hint=hint)
        return error


class SourceError(EnginewrightError):
    """A model directory, GGUF file or checkpoint that is missing, incomplete or damaged."""

    exit_code = 3


class SourceWarning(UserWarning):
    """A warning that an export uses a source less well than its user may expect."""


class UnsupportedModelError(EnginewrightError):
    """A model that can't be exported: it has no decoder or an unsupported op, or its attention isn't recognised."""

    exit_code = 4


class RecipeError(EnginewrightError):
    """A recipe that doesn't exist, or that has an unknown key or an invalid value."""

    exit_code = 5


class PassError(EnginewrightError):
    """A pass whose requirement isn't met, that breaks the program, or that must match something and matches nothing."""

    exit_code = 6


class BundleError(EnginewrightError):
    """A bundle that is missing, truncated, altered, or of a newer format."""

    exit_code = 7


class TrustError(BundleError):
    """A bundle with code that the caller doesn't allow to run, or with another hash than the trusted one."""


class RequestError(EnginewrightError, ValueError):
    """An invalid request or option, for example an empty prompt or a sampling value out of range."""

    exit_code = 8


class ContextError(RequestError):
    """A prompt that doesn't fit into the model's context.

    Attributes:
        context: the number of tokens in the context, which the prompt and the answer share.
        tokens: the number of tokens in the prompt.
        exact: True if ``tokens`` is exact; False if the prompt may have more tokens.
        room: the most tokens of a prompt: ``context`` - 1, or ``context`` if no token is generated.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        context: int,
        tokens: int,
        exact: bool = True,
        room: int | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.context, self.tokens, self.exact = context, tokens, exact
        self.room = context - 1 if room is None else room


class CapacityError(EnginewrightError):
    """Not enough memory, KV blocks or disk space."""

    exit_code = 9


class OverloadError(CapacityError):
    """A request that is refused because of other requests.

    Attributes:
        retry_after: the seconds after which the request may be accepted.
    """

    def __init__(self, message: str, *, retry_after: float) -> None:
        super().__init__(message, hint=f"Come back in {retry_after:.2g} s, or serve fewer requests at a time.")
        self.retry_after = retry_after


class OffloadError(CapacityError):
    """An ``offload_folder`` whose files of keys and values can't be written or read.

    Attributes:
        lost: name of a cache group -> the blocks whose keys and values are lost.
        full: True if a block can't be written; then computing the block again doesn't help.
    """

    def __init__(
        self, message: str, lost: Mapping[str, list[int]] = MappingProxyType({}), *, full: bool = True
    ) -> None:
        super().__init__(message, hint="Make room there, name another offload_folder, or pass more memory.")
        self.lost, self.full = dict(lost), full


_EXPORT_PACKAGES = frozenset({"gguf", "huggingface_hub", "pydantic", "safetensors", "torch", "transformers"})


class MissingDependencyError(EnginewrightError, ImportError):
    """An optional package that isn't installed; the hint names the extra of Enginewright that contains it."""

    exit_code = 10

    @classmethod
    @contextmanager
    def of(cls, packages: Collection[str], what: str, extra: str, instead: str = "") -> Iterator[None]:
        """Converts a failed import in its block to this error.

        Args:
            packages: the packages that may be missing.
            what: what needs them, such as "source: comparing with a source model".
            extra: the extra of Enginewright that contains them.
            instead: an alternative, for the hint.
        """
        try:
            yield
        except ModuleNotFoundError as e:
            package = (e.name or "").partition(".")[0]
            if package not in packages:
                raise
            hint = f"Install it with: pip install 'enginewright[{extra}]'" + (f"; or {instead}." if instead else "")
            raise cls(f"{what} needs {package}, which is not installed", hint=hint) from e

    @classmethod
    def of_export(cls, what: str, instead: str = "") -> AbstractContextManager[None]:
        """Converts a failed import of a package of ``enginewright[export]`` as `of` does."""
        return cls.of(_EXPORT_PACKAGES, what, "export", instead)


class VerificationError(EnginewrightError):
    """An exported program whose results differ from those of its source by more than the recipe allows."""

    exit_code = 11


class ComparisonError(EnginewrightError):
    """Two models or bundles that ``optimize bisect`` can't compare, for example with different vocabularies."""

    exit_code = 12


class TargetError(EnginewrightError):
    """A target that can't be built or run, for example because of an unknown GPU or another version of a library."""

    exit_code = 15


class PartialExportError(TargetError):
    """An export in which some targets failed. The bundle was written with the other targets.

    Attributes:
        report: the export's report; its ``failed`` has each error.
    """

    exit_code = 17

    def __init__(self, message: str, report: Any, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.report = report


KINDS: Mapping[str, type[EnginewrightError]] = {
    name: kind for name, kind in globals().items() if isinstance(kind, type) and issubclass(kind, EnginewrightError)
}
"""The errors of this module by name. An error of another module crosses a socket as its nearest base among them."""
