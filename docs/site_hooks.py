"""Hooks of MkDocs for the site: the navigation is docs/README.md, links out of docs/ lead to the repository, the
reference is made by mkdocstrings, and the code map and declarations are made from the sources (``site_code``)."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

from site_code import code_map, declarations

DOCS = Path(__file__).resolve().parent
PAGE = re.compile(r"\[([^\]]+)\]\((?!\.\./)([^)#]+\.md)\)")
OUTSIDE = re.compile(r"\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)")
ARCHITECTURE = "inside/architecture.md"
"""The page whose tables have the pages on adding something."""
REFERENCE = "use/python-reference.md"
"""The page that readers of the repository see as Markdown. The site has signatures, types and links in its place."""
CODE_MAP = "inside/code-map.md"
"""The page that gets a table of each folder's files on the site."""
ADDING = ("inside/adding/", "inside/finding-files.md")
"""The pages that get the declarations of the names that they mention."""


def navigation(index: str, architecture: str) -> list[dict[str, Any]]:
    """The pages that docs/README.md names, by its headings. A list, or a table below a line of text, has its own level.

    The last one has the pages of the tables in ``architecture``, which is the text of ARCHITECTURE.
    """
    groups: list[dict[str, Any]] = [{"Enginewright": "README.md"}]
    for part in index.split("\n## ")[1:]:
        heading, *blocks = part.split("\n\n")
        entries: list[dict[str, Any]] = []
        label = ""
        for block in blocks:
            pages = [{title: page} for title, page in PAGE.findall(block)]
            label = label if block.startswith("|") else re.split("[,:]", block)[0]
            entries += [{label: pages}] if label and pages else pages
        groups.append({heading.strip(): entries})
    adding = [{f"Add {title}": f"inside/{page}"} for title, page in PAGE.findall(architecture) if "/" in page]
    entries.append({"To add something": adding})
    return groups


def on_config(config: Any) -> Any:
    """Gives MkDocs the navigation, and the repository's address: each is listed in one place."""
    if not config.repo_url:
        project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        config.repo_url = project["urls"]["Repository"]
    pages = [(DOCS / name).read_text(encoding="utf-8") for name in ("README.md", ARCHITECTURE)]
    config.nav = navigation(*pages)
    return config


def public_names() -> list[str]:
    """The names that the package exports, without importing it."""
    module = ast.parse((DOCS.parent / "src" / "enginewright" / "__init__.py").read_text(encoding="utf-8"))
    (names,) = (
        node.value
        for node in module.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    )
    return [str(name) for name in ast.literal_eval(names)]


def reference() -> str:
    """The page of the reference, for mkdocstrings."""
    names = [name for name in public_names() if not name.startswith("_")]
    return "# Python reference\n\n" + "\n".join(f"::: enginewright.{name}\n" for name in names)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Lets links to files outside docs/ lead to the repository; one to a missing file stays, and MkDocs says so."""
    if page.file.src_uri == REFERENCE:
        return reference()
    if page.file.src_uri == CODE_MAP:
        return markdown + code_map()
    if page.file.src_uri.startswith(ADDING):
        markdown += declarations(markdown)

    def address(link: re.Match[str]) -> str:
        path = (Path(page.file.abs_src_path).parent / link[1]).resolve()
        if path.is_relative_to(DOCS) or not path.exists():
            return link[0]
        return f"]({config.repo_url.rstrip('/')}/blob/HEAD/{path.relative_to(DOCS.parent).as_posix()}{link[2] or ''})"

    return OUTSIDE.sub(address, markdown)
