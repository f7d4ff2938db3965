"""A model of 6 GiB exported within 4 GiB of memory: makes a random Llama, exports it, prints the system's peak.

    python benchmarks/large_model.py FOLDER [--gib 6] [--max-memory 4GiB] [--recipe int4-gptq] [--output FILE.json]

FOLDER gets the checkpoint (safetensors in bf16, in shards of 1 GiB) and the bundle, some 8 GiB for a model of 6; both
are removed at the end. The export is a process of its own, whose largest resident size the system tells when it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

HIDDEN = 3072
HEAD_SIZE = 128
SHARD_BYTES = 1 << 30
SPECIAL = ("<pad>", "<s>", "</s>")
RUN = "from enginewright.optimizer.cli.app import main; main()"


def layer_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """The weights of one layer by name, [N, K] and [H]."""
    hidden, wide = config.hidden_size, config.intermediate_size
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    return {
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (wide, hidden),
        "mlp.up_proj.weight": (wide, hidden),
        "mlp.down_proj.weight": (hidden, wide),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }


def make_model(folder: Path, size: int, hidden: int = HIDDEN, context: int = 2048, seed: int = 0) -> int:
    """Writes a random Llama of about ``size`` bytes into ``folder``; returns what its tensors take.

    ``hidden``: of its layers, a multiple of 384: three query heads share a key/value head. ``context``: its longest
    request in tokens.
    """
    folder.mkdir(parents=True)
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=hidden * 4 // 3,
        num_attention_heads=hidden // HEAD_SIZE,
        num_key_value_heads=hidden // HEAD_SIZE // 3,
        head_dim=HEAD_SIZE,
        num_hidden_layers=1,
        max_position_embeddings=context,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    config.architectures = ["LlamaForCausalLM"]
    shapes = layer_shapes(config)
    config.num_hidden_layers = max(1, round(size / (2 * sum(torch.Size(s).numel() for s in shapes.values()))))
    config.save_pretrained(folder)
    every = {"model.embed_tokens.weight": (len(tokenizer), hidden), "model.norm.weight": (hidden,)}
    every |= {"lm_head.weight": (len(tokenizer), hidden)}
    every |= {f"model.layers.{i}.{n}": s for i in range(config.num_hidden_layers) for n, s in shapes.items()}

    generator = torch.Generator().manual_seed(seed)
    noise = (torch.randn(4 * hidden * hidden, generator=generator) * 0.02).bfloat16()  # weights are parts of it
    shards: list[dict[str, torch.Tensor]] = [{}]
    total = filled = 0
    where: dict[str, int] = {}
    for name, shape in every.items():
        count = torch.Size(shape).numel()
        if filled and filled + 2 * count > SHARD_BYTES:
            write_shard(folder, len(shards), shards[-1])
            shards.append({})
            filled = 0
        start = int(torch.randint(len(noise) - count, (1,), generator=generator))
        value = noise[start : start + count].view(shape)
        if name == "lm_head.weight":
            value = value / 8  # a random model's logits would be as large as a trained one's, and mean nothing
        shards[-1][name] = torch.ones(shape, dtype=torch.bfloat16) if len(shape) == 1 else value.clone()
        where[name] = len(shards)
        filled, total = filled + 2 * count, total + 2 * count
    write_shard(folder, len(shards), shards[-1])
    index = {"metadata": {"total_size": total}, "weight_map": {n: shard_name(i) for n, i in where.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def shard_name(number: int) -> str:
    """The file of a shard."""
    return f"model-{number:05}.safetensors"


def write_shard(folder: Path, number: int, tensors: dict[str, torch.Tensor]) -> None:
    """Writes a shard and forgets its tensors."""
    save_file(tensors, folder / shard_name(number), metadata={"format": "pt"})
    tensors.clear()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>")


def write_text(path: Path, characters: int) -> None:
    """Words of random letters."""
    letters = random.Random(0)
    words = ("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(2, 9))) for _ in range(characters))
    path.write_text(" ".join(words)[:characters], encoding="utf-8")


def export(arguments: list[str]) -> tuple[float, int]:
    """Seconds and the largest resident size, in bytes, of ``optimize export`` as a process of its own."""
    start = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", RUN, "export", *arguments])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the export failed with exit code {process.returncode}")
    return time.perf_counter() - start, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    """Makes, exports, prints, removes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder for the model and the bundle; needs 8 GiB of disk")
    parser.add_argument("--gib", type=float, default=6.0, help="size of the model's tensors in GiB")
    parser.add_argument("--hidden", type=int, default=HIDDEN, help="a multiple of 384")
    parser.add_argument("--context", type=int, default=2048, help="below 64 it isn't compared on a text")
    parser.add_argument("--max-memory", default="4GiB")
    parser.add_argument("--recipe", default="int4-gptq")
    parser.add_argument("--tokens", type=int, default=256, help="of calibration text")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    model, bundle, text = (arguments.folder / n for n in ("model", "model.bundle", "calibration.txt"))
    try:
        size = make_model(model, int(arguments.gib * (1 << 30)), arguments.hidden, arguments.context)
        write_text(text, arguments.tokens)
        print(f"{model}: {size / (1 << 30):.2f} GiB of bf16", flush=True)
        options = ["--recipe", arguments.recipe, "--max-memory", arguments.max_memory, "--calibration", str(text)]
        seconds, peak = export([str(model), "-o", str(bundle), *options])
        report = json.loads((bundle / "report" / "report.json").read_text())
    finally:
        for path in (model, bundle):
            shutil.rmtree(path, ignore_errors=True)
        text.unlink(missing_ok=True)
    figures = {
        "model_bytes": size,
        "recipe": arguments.recipe,
        "max_memory": arguments.max_memory,
        "calibration_tokens": report["calibration"]["coverage"]["tokens"],
        "peak_bytes": peak,
        "reported": report["memory"],
        "bundle_bytes": report["bundle_bytes"],
        "seconds": round(seconds, 1),
        "stages": report["stages"],
        "machine": {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()},
    }
    print(json.dumps(figures, indent=1))
    print(f"peak: {peak / (1 << 30):.2f} GiB, allowed: {arguments.max_memory}, in {seconds:.0f} s")
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
