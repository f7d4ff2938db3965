"""Quantization-aware training: a model is trained with its weights in 4 bits, then exported bit for bit.

python examples/train_small_mha.py small-mha
python examples/train_int4.py small-mha small-mha.int4 --text small-mha/training.txt

Compare with what GPTQ makes of the same model: optimize export small-mha --recipe int4-gptq.
Needs enginewright[export].
"""

from __future__ import annotations

import argparse
from pathlib import Path

import enginewright as ew


def main() -> None:
    """Trains for the recipe int4, and exports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder or a GGUF file")
    parser.add_argument("output", type=Path, help="a folder for the recovery and the bundle")
    parser.add_argument("--text", type=Path, help="to train on; without it, it is sampled from the model")
    parser.add_argument("--recipe", default="int4")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=1e-4)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    options = ew.RecoverOptions(
        steps=arguments.steps, batch_tokens=arguments.batch_tokens, learning_rate=arguments.rate
    )
    recovery = ew.recover(
        arguments.model,
        arguments.output / "recovery",
        recipe=arguments.recipe,
        text=arguments.text,
        options=options,
        overwrite=True,
    )
    for what, one in (("rounded", recovery.measured[0]), ("trained", recovery.measured[-1])):
        print(f"{what}: KL {one.kl:.4f}, perplexity {one.perplexity:.3f}; the source's is {one.source_perplexity:.3f}")
    report = ew.export(
        arguments.model, arguments.output / "bundle", recovered=arguments.output / "recovery", overwrite=True
    )
    print(f"{report.path}: {report.bundle_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
