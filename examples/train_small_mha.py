"""Trains a small decoder with multi-head attention on the spot: something to group, prune and quantize.

python examples/train_small_mha.py small-mha

A Llama of 4 layers with 8 heads, each with keys and values of its own, learns source text of Python's standard library,
with a BPE tokenizer made for it: minutes on two cores. The folder gets the model, and beside it training.txt and
held_out.txt. Needs enginewright[export].
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HELD_OUT = 12
"""Every so many-th file that is read is not trained on."""
LENGTH = 256
"""Tokens of a sequence."""
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
"""Folders of other people's code, and of tables."""


def standard_library(every: int) -> tuple[str, str]:
    """Each so many-th source file of Python's standard library in two texts: to train on, and to measure by.

    A model sees them once or twice, so it learns how such text goes on, not the text itself: what is measured on the
    second is what holds of the first.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = [p for p in sorted(root.rglob("*.py")) if not LEFT_OUT & set(p.relative_to(root).parts)]
    texts = [p.read_text(encoding="utf-8", errors="replace") for p in files[::every]]
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    return "\n".join(t for i, t in enumerate(texts) if i % HELD_OUT != HELD_OUT - 1), "\n".join(held_out)


def make_tokenizer(text: str, vocabulary: int) -> transformers.PreTrainedTokenizerFast:
    """Byte-level BPE, learned from the text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<pad>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=vocabulary, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([text], trainer)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), special, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def make_model(vocabulary: int, hidden: int, layers: int) -> transformers.PreTrainedModel:
    """A random Llama whose heads all have keys and values of their own."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def train(model: transformers.PreTrainedModel, ids: torch.Tensor, steps: int, batch: int, rate: float) -> None:
    """AdamW, next-token loss, random pieces of the text."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    generator = torch.Generator().manual_seed(0)
    start = time.perf_counter()
    for step in range(steps):
        warm = min(1.0, (step + 1) / (0.05 * steps + 1))
        optimizer.param_groups[0]["lr"] = rate * warm * (0.05 + 0.475 * (1 + math.cos(math.pi * step / steps)))
        places = torch.randint(len(ids) - LENGTH, (batch,), generator=generator)
        rows = torch.stack([ids[p : p + LENGTH] for p in places.tolist()])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % max(1, steps // 10) == 0 or step == steps - 1:
            print(f"step {step + 1}/{steps}: loss {loss.item():.3f}, {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Trains, and saves the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--every", type=int, default=2, help="so many-th file of the library is read; 2 makes 4 MB")
    parser.add_argument("--rate", type=float, default=3e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    training, held_out = standard_library(arguments.every)
    tokenizer = make_tokenizer(training, arguments.vocabulary)
    ids = torch.tensor(tokenizer(training)["input_ids"])
    model = make_model(len(tokenizer), arguments.hidden, arguments.layers)
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens of text")
    train(model, ids, arguments.steps, arguments.batch, arguments.rate)
    model.save_pretrained(arguments.folder)
    tokenizer.save_pretrained(arguments.folder)
    (arguments.folder / "training.txt").write_text(training, encoding="utf-8")
    (arguments.folder / "held_out.txt").write_text(held_out, encoding="utf-8")


if __name__ == "__main__":
    main()
