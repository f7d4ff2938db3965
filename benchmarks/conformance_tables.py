"""The tables of clients on the page benchmarks/notes/conformance.md, made of the JSON files of ``conformance.py``."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from peers.marked_table import MarkedTable, line

Row = dict[str, Any]
TABLE = MarkedTable("conformance.py")
TABLE_OF_TEXTS = MarkedTable("conformance.py --only openai pooled")
CASES = {
    "first": "first script",
    "tools": "tools, two rounds",
    "structured": "structured answer",
    "overflow": "too long",
}
NOT_RUN = ("Open WebUI", "VS Code")
TEXT_CLIENTS: dict[str, tuple[str, str]] = {
    "OpenAI's client, its own tests": ("^test_embeddings", "openai"),
    "OpenAI's client": ("::test_openai", "openai"),
    "Ollama's client": ("::test_ollama$", "ollama"),
    "TEI's clients: Hugging Face's": ("::test_hugging_face_tei$", "huggingface_hub"),
    "TEI's clients: LlamaIndex's": ("::test_llama_index_tei$", "llama-index-embeddings-text-embeddings-inference"),
    "LlamaIndex, OpenAI's protocol": ("::test_llama_index$", "llama-index-embeddings-openai-like"),
    "LangChain's standard tests, OpenAI's protocol": ("TestOpenAIEmbeddings::", "langchain-openai"),
    "LangChain's standard tests, Ollama's protocol": ("TestOllamaEmbeddings::", "langchain-ollama"),
    "Cohere's client, v1 and v2 of rerank": ("::test_cohere_", "cohere"),
    "Cohere's protocol, by LangChain": ("::test_langchain_cohere$", "langchain-cohere"),
    "Jina's protocol, by LlamaIndex": ("::test_llama_index_jina$", "llama-index-postprocessor-jinaai-rerank"),
}
"""Title of a client of vectors and scores -> the pattern of its tests' names, and its package."""


def put(page: Path, found: Row) -> None:
    """Replaces the tables that a JSON file has the outcomes for."""
    if "clients" in found:
        TABLE.put(page, clients_table(found))
    if "pooled" in found:
        TABLE_OF_TEXTS.put(page, table_of_texts(found))


def clients_table(found: Row) -> str:
    """The table of clients and agents in the notes."""
    words = {"passed": "yes", "failed": "no"}
    lines = [line(["client", "version", *CASES.values()]), line(["---"] * (2 + len(CASES)))]
    outcomes = {row["name"]: words[row["outcome"]] for name in ("clients", "agents") for row in found[name]["tests"]}
    for name, packages in found["clients"]["packages"].items():
        cells = [outcomes.get(f"{name}: {title}", "not run") for title in CASES.values()]
        anchor = name.lower().replace(" ", "-")
        lines.append(line([f"[{name}](../../docs/use/clients.md#{anchor})", _versions(packages), *cells]))
    lines += ["", line(["agent", "version", "a task of five turns"]), line(["---"] * 3)]
    for name, packages in found["agents"]["packages"].items():
        lines.append(line([f"`{name}`", _versions(packages), outcomes[f"{name}: a task of five turns"]]))
    lines += [line([name, "", "not run"]) for name in NOT_RUN]
    return "\n".join(lines)


def table_of_texts(found: Row) -> str:
    """The table of clients of vectors and scores in the notes. Exits for a client whose tests failed or are missing."""
    lines = [line(["client", "package", "passed", "not applicable"]), line(["---"] * 4)]
    versions = dict(one.split("==") for one in found["pooled"]["packages"] if "==" in one)
    tests = [row for name in ("openai", "pooled") for row in found[name]["tests"]]
    for title, (pattern, package) in TEXT_CLIENTS.items():
        counts = Counter(row["outcome"] for row in tests if re.search(pattern, row["name"]))
        if not counts or set(counts) - {"passed", "not applicable"}:
            raise SystemExit(f"{title}: there is no place in the table for {dict(counts)}")
        numbers = [str(counts[outcome] or "") for outcome in ("passed", "not applicable")]
        lines.append(line([title, f"{package} {versions[package]}", *numbers]))
    return "\n".join(lines)


def _versions(packages: list[str]) -> str:
    """Packages with their versions, as a cell of a table."""
    return ", ".join(re.sub(r"(==|(?<=.)@)(?=[\d.]+$)", " ", one) for one in packages)
