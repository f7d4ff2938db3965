"""Groups a model's key and value heads, trains back what that costs, and exports the result.

python examples/train_small_mha.py small-mha
python examples/recover_gqa.py small-mha small-mha.gqa --text small-mha/training.txt

Each head's keys and values become one for all in its group, by a fit to what the model computes; then the program is
trained to give what the model gave. The bundle's KV cache takes a quarter of the bytes. Needs enginewright[export].
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import enginewright as ew

RECIPE = """
name = "gqa"
description = "A quarter of the key and value heads."

[attention]
kv_heads = {heads}

[budget]
max_kl = {max_kl}
"""


def main() -> None:
    """Recovers and exports; prints what both cost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a Hugging Face folder")
    parser.add_argument("output", type=Path, help="a folder for the recipe, the recovery and the bundle")
    parser.add_argument("--text", type=Path, help="to train on; without it, it is sampled from the model")
    parser.add_argument("--kv-heads", type=int, help="a quarter of the model's, unless told")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--max-kl", type=float, default=0.2)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text(encoding="utf-8"))
    there = config.get("num_key_value_heads") or config["num_attention_heads"]
    arguments.output.mkdir(parents=True, exist_ok=True)
    recipe = arguments.output / "gqa.toml"
    heads = arguments.kv_heads or max(1, there // 4)
    recipe.write_text(RECIPE.format(heads=heads, max_kl=arguments.max_kl), encoding="utf-8")
    options = ew.RecoverOptions(
        steps=arguments.steps, batch_tokens=arguments.batch_tokens, learning_rate=arguments.rate
    )
    recovery = ew.recover(
        arguments.model,
        arguments.output / "recovery",
        recipe=recipe,
        text=arguments.text,
        options=options,
        overwrite=True,
    )
    before, after = recovery.measured[0], recovery.measured[-1]
    print(f"{there} key and value heads became {heads}")
    print(f"on held-out text the source's perplexity is {after.source_perplexity:.3f}")
    print(f"converted:              {before.perplexity:.3f}, KL {before.kl:.4f}")
    print(f"after {after.step} steps:        {after.perplexity:.3f}, KL {after.kl:.4f}")
    report = ew.export(
        arguments.model, arguments.output / "bundle", recovered=arguments.output / "recovery", overwrite=True
    )
    print(f"{report.path}: {report.bundle_bytes / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
