"""Makes typings/tensorrt/__init__.pyi from TensorRT's own Python bindings; ``make types`` runs it.

The bindings import without TensorRT over empty libraries (tests/plugins/tensorrt/bindings_process.py makes them), and
pybind11-stubgen writes down what they are. This takes out documentation, and mends what isn't Python: an argument
called ``in``, ``...`` as a type, defaults before arguments without one, and ``bool``, which the module also calls a
data type. Where the bindings aren't installed, all of TensorRT is of type Any.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTPUT = Path(__file__).with_name("tensorrt") / "__init__.pyi"
BINDINGS = "tensorrt_bindings.tensorrt"
ANY = "from typing import Any\n\ndef __getattr__(name: str) -> Any: ...\n"
HEADER = """\
# Made by typings/generate_tensorrt.py. What the bindings say of themselves isn't consistent everywhere (a method may
# not take what its base class takes):
# mypy: ignore-errors
import builtins
"""


def parse(source: str) -> ast.Module:
    """The stub's syntax tree; gives a default to arguments that lack one behind others that don't."""
    while True:
        try:
            return ast.parse(source)
        except SyntaxError as e:
            if "non-default argument" not in e.msg or e.lineno is None or e.end_offset is None:
                raise
            lines = source.split("\n")
            line, end = lines[e.lineno - 1], e.end_offset - 1
            lines[e.lineno - 1] = f"{line[:end]} = ...{line[end:]}"
            source = "\n".join(lines)


class Types(ast.NodeTransformer):
    """Mends an annotation."""

    def visit_Constant(self, node: ast.Constant) -> ast.expr:
        return ast.Attribute(ast.Name("typing"), "Any") if node.value is ... else node

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Attribute(ast.Name("builtins"), "bool") if node.id == "bool" else node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        if isinstance(node.slice, ast.Tuple) and ast.unparse(node.value).endswith(("Callable", "tuple")):
            elements = node.slice.elts
            node.slice.elts = [e if ast.unparse(e) == "..." else self.visit(e) for e in elements]
            return node
        return self.generic_visit(node)


class Stub(ast.NodeTransformer):
    """Takes out documentation and mends annotations."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                argument.annotation = Types().visit(argument.annotation)
        if node.returns is not None:
            node.returns = Types().visit(node.returns)
        node.body = [ast.Expr(ast.Constant(...))]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
        node.annotation = Types().visit(node.annotation)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        self.generic_visit(node)
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Expr(ast.Constant(...))]
        return node


def described() -> str:
    """Returns the stubs that pybind11-stubgen writes of the bindings. Raises OSError or CalledProcessError."""
    sys.path.insert(0, str(ROOT))
    from tests.plugins.tensorrt.bindings_process import make_libraries

    with tempfile.TemporaryDirectory() as scratch:
        make_libraries(Path(scratch))
        command = [sys.executable, "-m", "pybind11_stubgen", BINDINGS, "-o", scratch, "--ignore-all-errors"]
        environment = {**os.environ, "LD_LIBRARY_PATH": scratch}
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return Path(scratch, *BINDINGS.split(".")).with_suffix(".pyi").read_text(encoding="utf-8")


def generated() -> str:
    """The stub's text."""
    if importlib.util.find_spec(BINDINGS.split(".")[0]) is None:
        print("typings: TensorRT's bindings are not installed, so its types are not checked", file=sys.stderr)
        return ANY
    source = re.sub(r"\bin: ", "in_: ", described()).replace(f"{BINDINGS}.", "")
    tree = Stub().visit(parse(source.replace("from __future__ import annotations\n", "")))
    return f"{HEADER}{ast.unparse(ast.fix_missing_locations(tree))}\n"


def main() -> int:
    try:
        text = generated()
    except (OSError, subprocess.CalledProcessError) as e:
        print(f"typings: no stub of TensorRT: {e}\n{getattr(e, 'stderr', '')}", file=sys.stderr)
        return 1
    beside = OUTPUT.with_suffix(".new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(OUTPUT)
    return 0


if __name__ == "__main__":
    sys.exit(main())
