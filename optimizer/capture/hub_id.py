"""Resolves a source's text to a path on this disk, or else to an id on the Hugging Face Hub.

``runtime.bundle.hub_id`` defines the form of an id.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from enginewright.runtime.bundle.hub_id import HubId, near_names, parse_hub_id
from enginewright.runtime.shared.errors import SourceError


def find_here(source: str | os.PathLike[str], *, revision: str | None = None, option: str = "") -> Path | HubId:
    """Returns a source's path on this disk, or else its Hub id; nothing is fetched.

    ``option``: the option that names the source, for messages. Raises SourceError if the text is neither, or is a path
    with a revision.
    """
    text = os.fspath(source)
    prefix = f"{option}: " if option else ""
    if os.path.exists(text):
        if revision is not None:
            raise SourceError(
                f"{prefix}revision {revision!r} is for models of the Hub, and {text} is on this disk",
                hint="Leave the revision out, or call the command from another folder.",
            )
        return Path(text)
    hub_id = parse_hub_id(text)
    if hub_id is None:
        hint = "a Hugging Face folder, a GGUF file, or a model's id on the Hub, such as org/name."
        bundles = option == "against"  # which takes what is compared with: bundles, too
        hint = f"{'a bundle, ' if bundles else ''}{hint}{near_names(Path(text), bundles=bundles, models=True)}"
        raise SourceError(f"{prefix}{text} doesn't exist", hint=f"Pass {hint}")
    if revision is not None:
        if hub_id.revision is not None:
            raise SourceError(
                f"{prefix}{text} names a revision, and {revision!r} is given too", hint="Leave one of them out."
            )
        hub_id = replace(hub_id, revision=revision)
    return hub_id
