"""Two hooks of MkDocs for the site: the navigation is docs/README.md, and links out of docs/ lead to the repository."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
PAGE = re.compile(r"\[([^\]]+)\]\(([^)#]+\.md)\)")
OUTSIDE = re.compile(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")


def navigation(index: str) -> list[dict[str, Any]]:
    """The pages that docs/README.md names, by its headings; a list below a table has a level of its own."""
    found: list[dict[str, Any]] = [{"Documentation": "README.md"}]
    for part in index.split("\n## ")[1:]:
        heading, *blocks = part.split("\n\n")
        entries: list[dict[str, Any]] = []
        for block in blocks:
            pages = [{title: page} for title, page in PAGE.findall(block)]
            entries += pages if block.startswith("|") else [{re.split("[,:]", block)[0]: pages}]
        found.append({heading.strip(): entries})
    return found


def on_config(config: Any) -> Any:
    """Gives MkDocs the navigation, and the repository's address: each is listed in one place."""
    if not config.repo_url:
        project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        config.repo_url = project["urls"]["Repository"]
    config.nav = navigation((DOCS / "README.md").read_text(encoding="utf-8"))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lets links to files outside docs/ lead to the repository; one to a missing file stays, and MkDocs says so."""

    def address(link: re.Match[str]) -> str:
        path = (Path(page.file.abs_src_path).parent / link[1]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return link[0]
        return f"]({config.repo_url.rstrip('/')}/blob/HEAD/{path.relative_to(DOCS.parent).as_posix()}{link[2] or ''})"

    return OUTSIDE.sub(address, markdown)
