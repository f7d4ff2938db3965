"""Searches a folder of texts with LangChain, against a server with an embedding model, a reranker and a chat model.

pip install langchain-openai langchain-cohere
optimize serve --model embed=minilm.bundle --model rerank=cross-encoder.bundle --model chat=smollm2.bundle
python examples/search_langchain.py docs "Which instruction sets are used?"
"""

import argparse
from pathlib import Path

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with .md files")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--chat", default="chat", help="the chat model's name; an empty one leaves the answer out")
    options = parser.parse_args()

    server = {"base_url": f"{options.url}/v1", "api_key": "none"}
    # Without check_embedding_ctx_length=False, ids of OpenAI's tokenizer would be sent.
    store = InMemoryVectorStore(OpenAIEmbeddings(model="embed", check_embedding_ctx_length=False, **server))
    paths = sorted(options.folder.rglob("*.md"))
    store.add_documents([Document(path.read_text(encoding="utf-8"), metadata={"file": str(path)}) for path in paths])
    candidates = store.similarity_search(options.question, k=20)
    rerank = CohereRerank(base_url=options.url, cohere_api_key="none", model="rerank", top_n=3)
    best = rerank.compress_documents(candidates, options.question)
    for one in best:
        print(f"{one.metadata['relevance_score']:.3f}  {one.metadata['file']}: {one.page_content[:80]}")
    if options.chat:
        texts = "\n\n".join(one.page_content for one in best)
        chat = ChatOpenAI(model=options.chat, max_tokens=100, **server)
        print(chat.invoke(f"Answer the question from the texts.\n\n{texts}\n\nQuestion: {options.question}").content)


if __name__ == "__main__":
    main()
