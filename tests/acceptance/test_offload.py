"""A context larger than the memory for it: the tokens of a large memory, under a limit that the system enforces; what
a folder can't do is named."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedModel

import enginewright as ew
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.runtime.shared.errors import CapacityError, OffloadError, RequestError

LENGTH = 4096
RECIPE = load_recipe("f32").model_copy(
    update={"adaptive_context": ContextOptions(best=64, first=32, last=32, whole_layers=2)}
)


@pytest.fixture(scope="module")
def bundle(tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 KiB of keys and values a token, of which two layers look at all: 80 MiB of ``LENGTH``."""
    path = tmp_path_factory.mktemp("offload") / "tiny.bundle"
    export(large_model(tiny_model), path, recipe=RECIPE, targets=["cpu"])
    return path


def large_model(tiny_model: Callable[..., PreTrainedModel]) -> PreTrainedModel:
    return tiny_model(
        "Llama",
        hidden_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        num_hidden_layers=10,
        max_position_embeddings=LENGTH,
    )


ASK = """
import json, resource, sys
import numpy as np
import enginewright as ew

path, memory, folder, limit = sys.argv[1:]
prompt = np.random.default_rng(1).integers(3, 256, 3900).tolist()
given = {"offload_folder": folder} if folder else {}
ew.LLM(path, memory="1MiB", max_requests=1, prefill_chunk=256).close()  # what is imported, and threads
size = int(next(line for line in open("/proc/self/status") if line.startswith("VmData")).split()[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (size + int(limit), size + int(limit)))
with ew.LLM(path, memory=memory, max_requests=1, prefill_chunk=256, **given) as llm:
    result = llm.generate([prompt], ew.SamplingParams(max_tokens=20, ignore_eos=True, logprobs=0))[0]
    info = llm.info()
    print(json.dumps({"tokens": result.token_ids, "logprobs": [one.logprob for one in result.logprobs],
                      "tokens_held": info["kv_cache_tokens"], "bytes": info["kv_cache_bytes"],
                      "offload": info.get("kv_offload")}))
"""


def ask(bundle: Path, memory: str, folder: Path | None, limit: int) -> subprocess.CompletedProcess[str]:
    arguments = [str(bundle), memory, "" if folder is None else str(folder), str(limit)]
    return subprocess.run([sys.executable, "-c", ASK, *arguments], capture_output=True, text=True, check=False)


def test_twice_the_memory_under_a_limit_of_the_system(bundle: Path, tmp_path: Path) -> None:
    whole = ask(bundle, "90MiB", None, 1 << 40)
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)
    limit = 76 << 20  # less than the 80 MiB that the keys and values of the context are
    refused = ask(bundle, "90MiB", None, limit)
    assert refused.returncode and "no memory for the KV caches" in refused.stderr, refused.stderr
    ran = ask(bundle, "40MiB", tmp_path / "waiting", limit)
    assert ran.returncode == 0, ran.stderr
    record = json.loads(ran.stdout)
    assert record["tokens"] == expected["tokens"] and record["logprobs"] == expected["logprobs"]
    assert record["bytes"] <= 40 << 20 and record["tokens_held"] == LENGTH
    assert record["offload"]["written"] > 0 and record["offload"]["read"] > 0 and not record["offload"]["lost"]
    assert list((tmp_path / "waiting").iterdir()) == []
    assert os.stat(tmp_path / "waiting").st_mode & 0o777 == 0o700


@pytest.mark.parametrize("way", ["a draft model", "static shapes"])
def test_with_other_ways_to_run(
    way: str, bundle: Path, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    other = tmp_path / "other.bundle"
    options: dict[str, object] = {}
    if way == "a draft model":
        export(tiny_model("Llama", max_position_embeddings=LENGTH), other, recipe="f32", targets=["cpu"])
        options["speculate"], other = other, bundle
    else:
        padded = RECIPE.model_copy(update={"buckets": BucketsSection(tokens=(1, 128), batch=(1,))})
        export(large_model(tiny_model), other, recipe=padded, targets=["cpu"])
    prompt = np.random.default_rng(2).integers(3, 256, 1000).tolist()
    params = ew.SamplingParams(max_tokens=12, ignore_eos=True)
    few = {"max_requests": 1, "prefill_chunk": 128, "context": 1024}
    with ew.LLM(bundle, memory="60MiB", **few) as llm:
        expected = llm.generate([prompt], params)[0].token_ids
    with ew.LLM(
        other, memory="15MiB", offload_folder=tmp_path / "waiting", offload_size="32MiB", **few, **options
    ) as llm:
        assert llm.generate([prompt], params)[0].token_ids == expected
        info = llm.info()
        assert info["kv_offload"]["written"] > 0, info
        assert info["buckets"] if way == "static shapes" else info["speculation"]["drafted"] > 0, info


FULL = """
import resource, signal, sys
import numpy as np
import enginewright as ew

path, folder = sys.argv[1:]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
rng = np.random.default_rng(1)
with ew.LLM(path, memory="20MiB", max_requests=3, prefill_chunk=256, offload_folder=folder, context=2400) as llm:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    prompts = [rng.integers(3, 256, n).tolist() for n in (2000, 60, 2000)]
    for result in llm.generate(prompts, ew.SamplingParams(max_tokens=4, ignore_eos=True), raise_errors=False):
        print(len(result.token_ids), "" if result.error is None else result.error.message)
"""


def test_a_full_disk_ends_what_needs_it_alone(bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "waiting"
    ran = subprocess.run(
        [sys.executable, "-c", FULL, str(bundle), str(folder)], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, short, last = ran.stdout.splitlines()
    problem = f"offload_folder: {folder}: keys and values can't be written there: File too large"
    assert (first, short, last) == (f"0 {problem}", "4 ", f"0 {problem}")


def test_what_cant_be_offloaded_is_said(
    bundle: Path, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    folder = tmp_path / "waiting"
    with pytest.raises(RequestError, match="offload_folder: several ranks"):
        ew.LLM(bundle, ranks=2, offload_folder=folder)
    with pytest.raises(RequestError, match="offload_folder: it doesn't go with prefix_folder"):
        ew.LLM(bundle, offload_folder=folder, prefix_folder=tmp_path / "prefixes")
    with pytest.raises(CapacityError, match=r"memory: 1.0 MiB is less than one token looks at"):
        ew.LLM(bundle, memory="1MiB", offload_folder=folder)
    with pytest.raises(CapacityError, match=r"offload_size: 1.0 KiB is less than"):
        ew.LLM(bundle, memory="64MiB", max_requests=1, offload_folder=folder, offload_size="1KiB")
    folder.chmod(0o755)
    with pytest.raises(OffloadError, match=f"offload_folder: {folder}: others may read or write it"):
        ew.LLM(bundle, offload_folder=folder)
    (tmp_path / "file").touch()
    with pytest.raises(OffloadError, match=r"offload_folder: .*file: it is not a folder"):
        ew.LLM(bundle, offload_folder=tmp_path / "file")
    export(tiny_model("Llama"), tmp_path / "whole.bundle", targets=["cpu", "onnx"])
    with pytest.raises(RequestError, match=r"offload_folder: .* is for target 'cpu', not 'onnx'"):
        ew.LLM(tmp_path / "whole.bundle", target="onnx", offload_folder=tmp_path / "other")
    with pytest.raises(RequestError, match="the layers of this bundle look at all keys"):
        ew.LLM(tmp_path / "whole.bundle", offload_folder=tmp_path / "other")


def test_conversations_share_what_waits(bundle: Path, tmp_path: Path) -> None:
    """A beginning that is in the file by now is found, and the part of a block copied."""
    rng = np.random.default_rng(3)
    document, other = (rng.integers(3, 256, n).tolist() for n in (1510, 1800))
    params = ew.SamplingParams(max_tokens=12, ignore_eos=True)
    with ew.LLM(bundle, max_requests=2) as whole:
        expected = [whole.generate([p], params)[0].token_ids for p in (document, other, [*document, 5])]
    with ew.LLM(
        bundle, memory="40MiB", max_requests=2, prefill_chunk=128, context=2048, offload_folder=tmp_path / "waiting"
    ) as llm:
        results = [llm.generate([p], params)[0] for p in (document, other, [*document, 5])]
        assert [r.token_ids for r in results] == expected
        assert results[2].num_cached_tokens == 1510
        assert llm.info()["kv_offload"]["read"] > 0
        with pytest.raises(RequestError, match="prefixes: blocks that may wait in offload_folder"):
            llm.save_prefix(document, tmp_path / "kept")
