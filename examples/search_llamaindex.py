"""Searches a folder of texts with LlamaIndex, against a server with an embedding model, a reranker and a chat model.

pip install llama-index-embeddings-openai-like llama-index-llms-openai-like llama-index-postprocessor-jinaai-rerank
optimize serve --model embed=minilm.bundle --model rerank=cross-encoder.bundle --model chat=smollm2.bundle
python examples/search_llamaindex.py docs "Which instruction sets are used?"
"""

import argparse
from pathlib import Path

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.jinaai_rerank import JinaRerank


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder with .md files")
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--chat", default="chat", help="the chat model's name; an empty one leaves the answer out")
    options = parser.parse_args()

    server = {"api_base": f"{options.url}/v1", "api_key": "none"}
    paths = sorted(options.folder.rglob("*.md"))
    # The document's id is its path: metadata would become part of the text.
    documents = [Document(text=path.read_text(encoding="utf-8"), id_=str(path)) for path in paths]
    index = VectorStoreIndex.from_documents(documents, embed_model=OpenAILikeEmbedding(model_name="embed", **server))
    rerank = JinaRerank(top_n=3, model="rerank", base_url=f"{options.url}/v1", api_key="none")
    candidates = index.as_retriever(similarity_top_k=20).retrieve(options.question)
    best = rerank.postprocess_nodes(candidates, query_str=options.question)
    for one in best:
        print(f"{one.score:.3f}  {one.node.ref_doc_id}: {one.node.get_content()[:80]}")
    if options.chat:
        from llama_index.llms.openai_like import OpenAILike

        texts = "\n\n".join(one.node.get_content() for one in best)
        chat = OpenAILike(model=options.chat, is_chat_model=True, max_tokens=100, **server)
        print(chat.complete(f"Answer the question from the texts.\n\n{texts}\n\nQuestion: {options.question}").text)


if __name__ == "__main__":
    main()
