"""Makes the files that engines read of a model, once: python -m peers.make_models MODEL FOLDER [--kinds KIND ...]

Everything starts from one GGUF: a real model's, or one with random weights and SmolLM2's tokenizer. Of it come ``hf``
(a Hugging Face folder for those that convert), ``f16``, ``q8_0`` and ``q4_0`` (GGUF; in q4_0 the table of tokens, which
is the head too, has 8 bits, as our recipe int4 has), the file itself by its type, and ``reference`` (logits of the
package's text in float32, by transformers). Other types of GGUF files llama.cpp makes (``peers.quantize``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from peers.convert_gguf import convert_gguf, copy_metadata
from peers.engines import STORED
from peers.loading import REPOSITORY, load_module
from peers.models import MODELS, RANDOM_SIZES, TEXT_TOKENS

SEED = 0
STD = 0.02
KINDS = ("hf", "f16", "q8_0", "q4_0", *STORED, "reference")


def fetched_gguf(model: str) -> Path:
    """A real model, fetched once."""
    path: Path = load_module("fetch_model", REPOSITORY / "examples" / "fetch_model.py").fetch(model)
    return path


def random_gguf(target: Path) -> Path:
    """A Llama of ``RANDOM_SIZES`` with random weights in bfloat16, and SmolLM2's tokenizer and other metadata."""
    sizes = RANDOM_SIZES
    source = gguf.GGUFReader(fetched_gguf("smollm2"))
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, "llama")
    head = sizes.hidden // sizes.heads
    copy_metadata(
        source,
        writer,
        {
            "llama.block_count": sizes.layers,
            "llama.embedding_length": sizes.hidden,
            "llama.feed_forward_length": sizes.feed_forward,
            "llama.attention.head_count": sizes.heads,
            "llama.attention.head_count_kv": sizes.kv_heads,
            "llama.rope.dimension_count": head,
            "general.name": "random weights",
        },
    )
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    random = np.random.default_rng(SEED)
    stored = gguf.GGMLQuantizationType.BF16
    kv = sizes.kv_heads * head

    def matrix(name: str, rows: int, columns: int) -> None:
        values = random.standard_normal((rows, columns), np.float32) * np.float32(STD)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, stored), raw_dtype=stored)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(sizes.hidden, np.float32))

    matrix("token_embd", sizes.vocabulary, sizes.hidden)
    for layer in range(sizes.layers):
        block = f"blk.{layer}."
        norm(block + "attn_norm")
        norm(block + "ffn_norm")
        matrix(block + "attn_q", sizes.hidden, sizes.hidden)
        matrix(block + "attn_k", kv, sizes.hidden)
        matrix(block + "attn_v", kv, sizes.hidden)
        matrix(block + "attn_output", sizes.hidden, sizes.hidden)
        matrix(block + "ffn_gate", sizes.feed_forward, sizes.hidden)
        matrix(block + "ffn_up", sizes.feed_forward, sizes.hidden)
        matrix(block + "ffn_down", sizes.hidden, sizes.feed_forward)
    norm("output_norm")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    os.replace(unfinished, target)
    return target


def source_gguf(model: str, folder: Path) -> Path:
    """The file that everything else is made from."""
    if not MODELS[model].random:
        return fetched_gguf(model)
    path = folder / "source.gguf"
    return path if path.exists() else random_gguf(path)


def hf_folder(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The weights of a GGUF as a Hugging Face folder with its tokenizer."""
    if (target / "config.json").exists():
        return target
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
    # What was read from blocks is not saved as such; a model of the same configuration and weights is.
    config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(unfinished)
    os.replace(unfinished, target)
    return target


def reference(folder: Path) -> Path:
    """Logits [T, V] of the first tokens of the package's text in float32, and the tokens beside them."""
    target = folder / "reference.npz"
    if target.exists():
        return target
    text = (REPOSITORY / "optimizer" / "measure" / "evaluation_text.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(folder / "hf")(text)["input_ids"][:TEXT_TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder / "hf", dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0].numpy()
    np.savez(folder / "unfinished.npz", ids=np.asarray(ids, np.int32), logits=logits)
    os.replace(folder / "unfinished.npz", target)
    return target


def make(model: str, folder: Path, kinds: list[str]) -> None:
    """Makes what is missing of ``kinds`` in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    source = source_gguf(model, folder)
    if "hf" in kinds or "reference" in kinds:
        hf_folder(source, folder / "hf", torch.bfloat16 if MODELS[model].random else torch.float32)
    stored = MODELS[model].stored
    if stored in kinds and not (folder / f"{stored}.gguf").exists():
        shutil.copyfile(source, folder / "stored.unfinished")
        os.replace(folder / "stored.unfinished", folder / f"{stored}.gguf")
    for kind, table in (("f16", None), ("q8_0", None), ("q4_0", "Q8_0")):
        if kind in kinds and not (folder / f"{kind}.gguf").exists():
            convert_gguf(source, folder / f"{kind}.gguf", kind.upper(), table=table)
    if "reference" in kinds:
        reference(folder)


def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    options = parser.parse_args(arguments)
    make(options.model, options.folder, options.kinds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
