"""Reads the sources for the site: the code map with what connects files, and the declarations that a page names.

``python docs/site_code.py FOLDER`` writes the pages of docs/inside as the site has them, as Markdown.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("runtime", "passes", "plugins", "optimizer", "benchmarks")
SOURCES = (".py", ".h", ".cpp", ".js")
LEFT_OUT = {"tests", "vendor", "__pycache__", "results", "notes"}
INCLUDED = tuple(Path(folder) for folder in ("plugins/cpu/kernels", "plugins/native", "plugins"))
"""Folders in which C++ looks for headers."""
COMMENT = re.compile(r"\A((?://[^\n]*\n)+)")
INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)
CPP_TYPE = re.compile(r"^(?:struct|class|enum class)(?: \[\[\w+\]\]| EW_\w+)? (\w+)[^;\n]*\{", re.M)
JS_EXPORT = re.compile(r"^export (?:async )?(?:function|const|let|class) (\w+)", re.M)
JS_IMPORT = re.compile(r'^import (?:\{([^}]*)\}|(\w+)|\* as \w+) from "\./([\w-]+\.js)"', re.M)
PATH = re.compile(r"(?<![\w/.-])(?:benchmarks|optimizer|passes|plugins|runtime|src|tests)/[\w./-]*\w")
NAME = re.compile(r"`(_*[A-Za-z]\w*(?:\.\w+)*)`")
MOST_USERS, MOST_LINES = 16, 48
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(eq=False)
class Source:
    """A source file.

    Attributes:
        path: its path.
        text: its content.
        users: the files that use it -> the names that they take from it.
        makers: record -> the other files that make one.
    """

    path: Path
    text: str
    users: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    makers: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    @property
    def name(self) -> str:
        """The path below the repository."""
        return self.path.relative_to(ROOT).as_posix()

    @cached_property
    def module(self) -> ast.Module:
        """The syntax tree; empty if it isn't Python."""
        return ast.parse(self.text if self.path.suffix == ".py" else "")

    @property
    def summary(self) -> str:
        """The first sentence about the file."""
        if self.path.suffix == ".py":
            comment = ast.get_docstring(self.module) or ""
        else:
            opening = COMMENT.match(self.text)
            comment = "" if opening is None else re.sub(r"^// ?", "", opening[1], flags=re.MULTILINE)
        return _first_sentence(comment)

    @property
    def definitions(self) -> list[Definition]:
        """The classes and functions of a Python module."""
        return [node for node in self.module.body if isinstance(node, Definition)]

    @property
    def tables(self) -> dict[str, ast.Assign | ast.AnnAssign]:
        """The constants of a Python module by name."""
        tables: dict[str, ast.Assign | ast.AnnAssign] = {}
        for node in self.module.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                tables.update({target.id: node for target in targets if isinstance(target, ast.Name)})
        return tables

    @property
    def names(self) -> list[str]:
        """The public classes and functions, then the tables: constants that are collections. Of C++ the types."""
        if self.path.suffix != ".py":
            return (JS_EXPORT if self.path.suffix == ".js" else CPP_TYPE).findall(self.text)
        public = [node.name for node in self.definitions if not node.name.startswith("_")]
        collections = (ast.Dict, ast.DictComp, ast.Tuple, ast.List, ast.Set, ast.Call)
        tables = [name for name, node in self.tables.items() if isinstance(node.value, collections) and name.isupper()]
        return public + tables

    @property
    def records(self) -> dict[str, list[str]]:
        """Record -> its fields: the classes whose bodies declare values."""
        records = {}
        for node in self.definitions:
            if isinstance(node, ast.ClassDef) and (fields := _fields(node)):
                records[node.name] = [each.split(":")[0] for each in fields]
        return records


@cache
def sources() -> dict[str, Source]:
    """Returns path -> source file of the product and the benchmarks, with the users of each."""
    files: dict[str, Source] = {}
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*"), key=lambda path: (path.parent, path.name)):
            if path.suffix in SOURCES and LEFT_OUT.isdisjoint(path.parts) and path.is_file():
                source = Source(path, path.read_text(encoding="utf-8"))
                files[source.name] = source
    for source in files.values():
        nodes = list(ast.walk(source.module))
        called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
        for used, name in _uses(source, nodes, files):
            files[used].users[source.name].add(name)
            if name in called:
                files[used].makers[name].add(source.name)
    return files


def _uses(source: Source, nodes: Sequence[ast.AST], files: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yields (path of another file, name that ``source`` takes from it); the name is empty for a whole file.

    ``nodes``: the nodes of its syntax tree. ``files``: the paths that there are.
    """
    folder = source.path.parent.relative_to(ROOT)
    if source.path.suffix == ".py":
        for node in nodes:
            if isinstance(node, ast.ImportFrom):
                parts = node.module.split(".") if node.module else []
                if node.level:
                    parts = [*folder.parts[: len(folder.parts) - node.level + 1], *parts]
                elif parts[:1] == ["enginewright"]:
                    parts = parts[1:]
                elif (ROOT / "benchmarks" / f"{'/'.join(parts)}.py").exists():
                    parts = ["benchmarks", *parts]
                for alias in node.names:
                    for path, name in (("/".join(parts), alias.name), ("/".join([*parts, alias.name]), "")):
                        if f"{path}.py" in files:
                            yield f"{path}.py", name
    elif source.path.suffix == ".js":
        for names, name, module in JS_IMPORT.findall(source.text):
            if (path := (folder / module).as_posix()) in files:
                yield from ((path, each.strip()) for each in (names or name).split(","))
    else:
        for header in INCLUDE.findall(source.text):
            for place in (folder, *INCLUDED):
                if (path := os.path.normpath(place / header)) in files:
                    yield path, ""
                    break


def code_map() -> str:
    """Returns the tables of the code map: for each folder its files with what uses them, then its records."""
    lines: list[str] = []
    folders: dict[Path, list[Source]] = defaultdict(list)
    for source in sources().values():
        explained = source.path.suffix == ".cpp" and source.path.with_suffix(".h").exists()  # by its header
        if not explained and source.path.name != "__init__.py":
            folders[source.path.parent].append(source)
    for folder, files in folders.items():
        lines += ["", f"## {folder.relative_to(ROOT).as_posix()}/", ""]
        lines += ["| file | contents | names | used by |", "| --- | --- | --- | --- |"]
        for source in files:
            names = ", ".join(f"`{name}`" for name in source.names)
            lines.append(f"| {source.path.name} | {_cell(source.summary)} | {names} | {_users(source)} |")
        records = [(name, fields, source) for source in files for name, fields in source.records.items()]
        if records:
            lines += ["", "| record | fields | made in |", "| --- | --- | --- |"]
        for name, fields, source in records:
            makers = sorted(_near(user, source) for user in source.makers[name]) or [source.path.name]
            lines.append(f"| `{name}` | {', '.join(fields)} | {_some(makers)} |")
    return "\n".join(lines)


def _users(source: Source) -> str:
    return _some(
        f"{_near(user, source)} ({', '.join(sorted(names - {''}))})" if names - {""} else _near(user, source)
        for user, names in sorted(source.users.items())
    )


def _near(user: str, source: Source) -> str:
    """Returns the path of a file; its name alone if it is in the folder of ``source``."""
    path = Path(user)
    return path.name if ROOT / path.parent == source.path.parent else user


def _some(items: Iterable[str]) -> str:
    every = list(items)
    more = len(every) - MOST_USERS
    return ", ".join(every[:MOST_USERS]) + (f" and {more} more" if more > 0 else "")


def declarations(page: str) -> str:
    """Returns the declarations of the names that a page mentions, from the files of the same line or of the page."""
    shown: dict[tuple[str, str], str] = {}
    mentioned = _files_of(page)
    for line in page.splitlines():
        for name in NAME.findall(line):
            for source in dict.fromkeys([*_files_of(line), *mentioned]):
                if (source.name, name) in shown:
                    break
                if declared := declaration(name, source):
                    language = "python" if source.path.suffix == ".py" else "cpp"
                    shown[source.name, name] = f"`{source.name}`:\n\n```{language}\n{declared}\n```"
                    break
    if not shown:
        return ""
    return "\n\n## Declarations of the names above\n\n" + "\n\n".join(shown.values()) + "\n"


@cache
def _source(path: str) -> Source:
    return sources().get(path) or Source(ROOT / path, (ROOT / path).read_text(encoding="utf-8"))


def _files_of(text: str) -> list[Source]:
    """Returns the source files whose paths a text has."""
    return [_source(path) for path in PATH.findall(text) if path.endswith(SOURCES) and (ROOT / path).is_file()]


def declaration(name: str, source: Source) -> str:
    """Returns the declaration of a name in a file, shortened; an empty text if the file doesn't declare it."""
    if source.path.suffix != ".py":
        return _cpp_declaration(name, source.text)
    first, _, rest = name.partition(".")
    for node in source.definitions:
        if node.name == first and not rest:
            return _shortened(_class(node) if isinstance(node, ast.ClassDef) else _signature(node))
        if isinstance(node, ast.ClassDef) and (node.name == first or not rest):
            for method in _methods(node):
                if method.name == (rest or first):
                    return _shortened([f"class {node.name}:", *(f"    {line}" for line in _signature(method))])
    table = source.tables.get(name)
    if table is None:
        return ""
    stated = [node.id for node in ast.walk(getattr(table, "annotation", table)) if isinstance(node, ast.Name)]
    called = [ast.unparse(node.func) for node in ast.walk(table) if isinstance(node, ast.Call)]
    classes = {node.name: _class(node) for node in source.definitions if isinstance(node, ast.ClassDef)}
    of_entries = [classes[each] for each in [*stated, *called] if each in classes and each != name]
    return "\n\n".join(_shortened(lines) for lines in [_table(table, source.text), *of_entries[:1]])


def _class(node: ast.ClassDef) -> list[str]:
    """Returns the lines of a class: its fields, and the signatures of its public methods."""
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    lines = [f"@{ast.unparse(each)}" for each in node.decorator_list]
    fields = _fields(node)
    comment = (ast.get_docstring(node) or "").splitlines()
    lines.append(f"class {node.name}({bases}):" if bases else f"class {node.name}:")
    if fields and 1 < len(comment) <= MOST_LINES // 2:  # it describes the fields
        lines += [f'    """{comment[0]}', *(f"    {line}".rstrip() for line in comment[1:]), '    """']
    else:
        lines += _quoted(node, "    ")
    lines += [f"    {each}" for each in fields]
    for method in _methods(node):
        if not method.name.startswith("_") or (method.name == "__init__" and len(method.args.args) > 1):
            lines += [f"    {line}" for line in _signature(method)]
    return lines


def _methods(node: ast.ClassDef) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]


def _fields(node: ast.ClassDef) -> list[str]:
    return [
        ast.unparse(each)
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_")
    ]


def _signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Returns the lines of a function's signature, with the first sentence of its docstring."""
    kind = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    returns = "" if node.returns is None else f" -> {ast.unparse(node.returns)}"
    decorators = [f"@{ast.unparse(each)}" for each in node.decorator_list]
    return [*decorators, f"{kind} {node.name}({ast.unparse(node.args)}){returns}: ...", *_quoted(node, "    ")]


def _quoted(node: Definition, indent: str) -> list[str]:
    comment = _first_sentence(ast.get_docstring(node) or "")
    return [f'{indent}"""{comment}"""'] if comment else []


def _table(node: ast.Assign | ast.AnnAssign, text: str) -> list[str]:
    """Returns the lines of a constant: of a long collection its first and its last entry."""
    lines = text.splitlines()
    whole = lines[node.lineno - 1 : node.end_lineno]
    value = node.value.generators[0].iter if isinstance(node.value, ast.DictComp) else node.value
    entries = value.values if isinstance(value, ast.Dict) else getattr(value, "elts", [])
    if len(whole) <= 10 or len(entries) < 3:
        return whole
    keys = value.keys if isinstance(value, ast.Dict) else entries
    begins = [(key or entry).lineno - 1 for key, entry in zip(keys, entries, strict=True)]
    first, more = lines[node.lineno - 1 : entries[0].end_lineno], f"    ...  # {len(entries) - 2} more"
    return [*first, more, *lines[begins[-1] : node.end_lineno]]


def _cpp_declaration(name: str, text: str) -> str:
    """Returns the first declaration of a name in C++: a type, a table, a macro or a function."""
    kinds = (
        rf"^[^\n/]*\b(?:struct|class|enum class|enum) {name}\b[^;\n]*\{{",
        rf"^#define {name}\b",
        rf"^[^\n/]*\b{name}(?:\[\w*\])?(?: =)? ?\{{",
        rf"^\w[\w:<>,&* ~\[\]]*\b{name}\([^\n]*",
        rf"^ +\w[\w:<>,&* ~\[\]]* [&*]?{name}\([^\n]*",
    )
    for kind in kinds:
        if (match := re.search(kind, text, re.M)) is not None:
            lines, depth = list[str](), 0
            for line in text[match.start() :].splitlines():
                lines.append(line)
                depth += line.count("{") - line.count("}")
                continued = line.endswith(("\\", ",", "("))
                if (depth <= 0 and not continued) or len(lines) > MOST_LINES:
                    break
            return _shortened(lines)
    return ""


def _first_sentence(comment: str) -> str:
    return re.split(r"(?<=\.)\s", " ".join(comment.split("\n\n")[0].split()), maxsplit=1)[0]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _shortened(lines: list[str]) -> str:
    more = len(lines) - MOST_LINES
    return "\n".join(lines if more <= 1 else [*lines[:MOST_LINES], f"    ...  {more} more lines"])


def main(folder: str) -> None:
    """Writes docs/inside as the site has it."""
    inside = ROOT / "docs" / "inside"
    for page in inside.rglob("*.md"):
        written = Path(folder) / page.relative_to(inside)
        written.parent.mkdir(parents=True, exist_ok=True)
        text = page.read_text(encoding="utf-8")
        text += code_map() if page.name == "code-map.md" else ""
        text += declarations(text) if page.parent.name == "adding" or page.name == "finding-files.md" else ""
        written.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
