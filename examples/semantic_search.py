"""Searches a folder of texts: an embedding bundle finds passages, a reranker orders them, a chat bundle answers.

    python examples/semantic_search.py minilm.bundle docs "Which instruction sets are used?" \\
        --rerank cross-encoder.bundle --chat smollm2.bundle
"""

import argparse
from pathlib import Path

import numpy as np

from enginewright import LLM, SamplingParams

PASSAGE = 100  # words


def passages(folder: Path) -> list[tuple[str, str]]:
    """Returns the passages of all text files of a folder, each with the name of its file."""
    parts = []
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".md", ".txt") and path.is_file():
            words = path.read_text(encoding="utf-8").split()
            for begin in range(0, len(words), PASSAGE):
                parts.append((str(path), " ".join(words[begin : begin + PASSAGE])))
    return parts


def prompt_of(llm: LLM, *names: str) -> str | None:
    """Returns the first of these prompts that the model has, such as that of queries."""
    return next((name for name in names if name in llm.model.pooling.prompts), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embed", help="a bundle of an embedding model")
    parser.add_argument("folder", type=Path, help="a folder with .md and .txt files")
    parser.add_argument("question")
    parser.add_argument("--rerank", help="a bundle of a reranker")
    parser.add_argument("--chat", help="a bundle of a model that writes text")
    parser.add_argument("--top", type=int, default=5, help="passages that are shown")
    options = parser.parse_args()

    parts = passages(options.folder)
    texts = [text for _, text in parts]
    with LLM(options.embed) as llm:
        vectors = llm.embed(texts, prompt=prompt_of(llm, "document", "passage"), normalize=True, truncate=True)
        query = llm.embed(options.question, prompt=prompt_of(llm, "query"), normalize=True)
    scores = vectors @ query  # cosines, as both have the length 1
    best = np.argsort(-scores)[: 10 * options.top]
    if options.rerank:
        with LLM(options.rerank) as llm:
            scores[best] = llm.score(options.question, [texts[i] for i in best], truncate=True)
        best = best[np.argsort(-scores[best])]
    best = best[: options.top]
    for i in best:
        print(f"{scores[i]:.3f}  {parts[i][0]}: {texts[i][:80]}")
    if options.chat:
        context = "\n\n".join(texts[i] for i in best)
        message = f"Answer the question from the texts.\n\n{context}\n\nQuestion: {options.question}"
        with LLM(options.chat) as llm:
            print(llm.chat([{"role": "user", "content": message}], SamplingParams(max_tokens=100))[0].text)


if __name__ == "__main__":
    main()
