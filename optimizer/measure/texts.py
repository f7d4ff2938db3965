"""What to evaluate on: files of text, and the ones that come with the package."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from enginewright.runtime.bundle.regular_file import MOST_TEXT_BYTES, read_regular
from enginewright.runtime.shared.errors import RequestError

BUILT_IN = "built-in"
"""Instead of a file: the text, or the questions, that come with the package."""

EVALUATION_TEXT = "evaluation_text.txt"
"""The file of the text that comes with the package."""


def read_text(source: str | Path, option: str, built_in: str) -> str:
    """The text of a file, or of the package's file ``built_in`` if ``source`` is BUILT_IN.

    A byte order mark is dropped; line ends stay as they are.

    Args:
        source: a path or BUILT_IN.
        option: what the caller set, for messages: "text" or "choices".
        built_in: name of a file in this package.

    Raises:
        RequestError: the file can't be read, is binary, isn't UTF-8, or has nothing but white space; names the place.
    """
    if source == BUILT_IN:
        data = resources.files(__package__).joinpath(built_in).read_bytes()
    else:
        try:
            data = read_regular(source, most=MOST_TEXT_BYTES, piped=True)
        except OSError as e:
            raise RequestError(
                f"{option}: {source} can't be read: {e.strerror}", hint="Pass a file of text in UTF-8."
            ) from e
    zero = data.find(b"\0")
    if zero >= 0:
        raise RequestError(
            f"{option}: {source} is binary: byte {zero} is zero", hint="Pass a file of text in UTF-8, as it is."
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise RequestError(
            f"{option}: {source} is not UTF-8 at byte {e.start}", hint="Convert the file to UTF-8."
        ) from e
    if not text.strip():
        raise RequestError(f"{option}: {source} is empty", hint="Pass a file with some text in it.")
    return text
