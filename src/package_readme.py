"""The description of the package for an index: README.md with absolute links.

An index shows the README without the repository's files, so its relative links and pictures would lead nowhere. In the
repository they stay relative, and work in a clone and in a fork. The address is ``[project.urls]`` of pyproject.toml.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)[^)\s]+")
_PICTURE = re.compile(r'(?<=(?:.src|cset)=")(?![a-z]+:)[^"]+')


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Returns a README whose links lead to the repository's files as they are in the release ``version``."""
    text = _LINK.sub(lambda link: f"{repository}/blob/v{version}/{link[0]}", text)
    return _PICTURE.sub(lambda picture: f"{repository}/raw/v{version}/{picture[0]}", text)


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the field ``readme``; scikit-build-core calls this."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    absolute = with_absolute_links(text, project["urls"]["Repository"], project["version"])
    return {"readme": {"content-type": "text/markdown", "text": absolute}}
