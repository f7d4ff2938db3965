"""Generates op_declarations.h, which table.cpp includes, from runtime/shared/op_schema.py. The build runs it.

    python write_declarations.py op_schema.py op_declarations.h

Neither the package nor its dependencies need to be installed: op_schema.py imports only the standard library.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def load_ops(path: Path) -> Mapping[str, Any]:
    """Returns the table ``OPS`` of the file ``path``, without importing its package."""
    spec = importlib.util.spec_from_file_location("op_schema", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["op_schema"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    ops: Mapping[str, Any] = module.OPS
    return ops


def declarations(ops: Mapping[str, Any]) -> str:
    """Returns the header's text: tables of each op's operands and attributes, and one of the ops."""
    lines, rows = ["// Made of runtime/shared/op_schema.py by write_declarations.py. Don't edit it."], []
    for name, op in ops.items():
        inputs = [f'{{"{i.name}", "{i.when}"}}' for i in op.inputs]
        attributes = [f'{{"{a.name}", AttributeKind::{a.kind}, {str(a.needed).lower()}}}' for a in op.attributes]
        spans = []
        for kind, items in (("Input", inputs), ("Attribute", attributes)):
            table = f"k{kind}s_{name}"
            if items:
                lines.append(f"constexpr {kind}Declaration {table}[] = {{{', '.join(items)}}};")
            spans.append(table if items else "{}")
        rows.append(f'    {{"{name}", {", ".join(spans)}, {len(op.outputs)}, {str(op.any_number).lower()}}},')
    return "\n".join([*lines, "constexpr OpDeclaration kDeclarations[] = {", *rows, "};", ""])


if __name__ == "__main__":
    schema, header = map(Path, sys.argv[1:])
    header.parent.mkdir(parents=True, exist_ok=True)
    header.write_text(declarations(load_ops(schema)), encoding="utf-8")
