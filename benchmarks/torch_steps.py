"""The speed of a model's steps in torch: transformers' eager, and packages of fixed sizes by torch's AOTInductor.

    python benchmarks/torch_steps.py eager MODEL.gguf
    python benchmarks/torch_steps.py compile MODEL.gguf FOLDER
    python benchmarks/torch_steps.py measure FOLDER

Each package is transformers' model with a static cache, its own weights and caches in it: a prompt of 512 tokens, and a
token of 1, 8 and 16 requests. So what is timed is steps of those sizes, and not an engine that generates: the packages
don't share their caches, and nothing samples or schedules. Prints a line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from peers.workload import memory
from stablehlo import BATCHES, CONTEXT, PROMPT, of_transformers, past, prompts, steps
from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

PLACES = {"prefill": CONTEXT + 1} | {f"decode_{batch}": CONTEXT + 1 if batch == 1 else 256 for batch in BATCHES}
"""The places of each package's cache; attention goes over all of them."""


class Step(TorchExportableModuleWithStaticCache):
    """Logits [B, 1, V] of the last of tokens [B, S] that go to these places [S] of the cache."""

    def forward(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
        for layer in self.static_cache.layers:
            layer.cumulative_length.copy_(cache_position[0])
        out = self.model(input_ids=input_ids, past_key_values=self.static_cache, use_cache=True, logits_to_keep=1)
        logits: torch.Tensor = out.logits
        return logits


def inputs(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, and their places."""
    if name == "prefill":
        return torch.tensor(prompts(1, PROMPT)), torch.arange(PROMPT)
    batch = int(name.rpartition("_")[2])
    return torch.tensor(prompts(batch, 1)), torch.tensor([past(batch)])


def compile_packages(model: Path, folder: Path) -> dict[str, Any]:
    """Seconds, bytes and the most memory of compiling each."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(
        str(model.parent), gguf_file=model.name, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    loaded.generation_config.cache_implementation = "static"
    folder.mkdir(parents=True, exist_ok=True)
    figures: dict[str, Any] = {"seconds": {}, "bytes": {}}
    for name, places in PLACES.items():
        start = time.perf_counter()
        ids, where = inputs(name)
        with torch.no_grad():
            step = Step(loaded, batch_size=len(ids), max_cache_len=places)
            exported = torch.export.export(step, args=(ids, where), strict=True)
            path = torch._inductor.aoti_compile_and_package(exported, package_path=str(folder / f"{name}.pt2"))
        figures["seconds"][name] = time.perf_counter() - start
        figures["bytes"][name] = Path(path).stat().st_size
        print(name, figures, file=sys.stderr, flush=True)
    return figures | {"peak": memory("VmHWM")}


def measure(folder: Path, threads: int) -> dict[str, float]:
    """Tokens a second: the median of 5 prompts, and of as many decode steps as for transformers' eager."""
    torch.set_num_threads(threads)
    figures = {}
    for name in PLACES:
        step = torch._inductor.aoti_load_package(str(folder / f"{name}.pt2"))
        ids, where = inputs(name)
        step(ids, where)
        times = []
        for index in range(5 if name == "prefill" else steps(len(ids))):
            begun = time.perf_counter()
            step(ids, where if name == "prefill" else where + index)
            times.append(time.perf_counter() - begun)
        figures[name] = ids.numel() / statistics.median(times)
        del step
    return figures | {"peak": float(memory("VmHWM"))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("eager", "compile", "measure"))
    parser.add_argument("paths", type=Path, nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    if arguments.task == "compile":
        figures = compile_packages(*arguments.paths)
    elif arguments.task == "measure":
        figures = measure(*arguments.paths, arguments.threads)
    else:
        figures = of_transformers(*arguments.paths, arguments.threads) | {"peak": memory("VmHWM")}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
