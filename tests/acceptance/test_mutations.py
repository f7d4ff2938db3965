"""10,000 damaged files: each is refused with an error of ours, or opens and runs; none ends or holds up the process."""

from __future__ import annotations

import fcntl
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from enginewright.optimizer.capture.gguf.blocks import Q2_0
from enginewright.optimizer.capture.gguf.blocks import SIZES as BLOCK_SIZES
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.bucket_section import BucketsSection
from enginewright.optimizer.recipes.recipe import Recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.passes.formats.weight_format import WeightFormat
from enginewright.passes.framework.kv_options import ContextOptions
from enginewright.passes.framework.weight_formats import WeightFormats
from enginewright.plugins.gpu.recipe import EnginesSection
from enginewright.plugins.tvm.recipe import TvmOptions
from tests.acceptance.mutation_worker import EXTENSION

# What is damaged: a subject of mutation_worker.py, in which of the folders made below, how many times.
CASES = [
    ("safetensors", "checkpoint", 1200),
    ("shards", "shards", 400),
    ("config", "checkpoint", 300),
    ("tokenizer", "checkpoint", 200),
    ("gguf", "gguf", 1500),
    ("gguf", "kquants", 2000),
    ("manifest", "Llama-f32", 800),
    ("target", "Llama-f32", 300),
    ("index", "Llama-f32", 500),
    ("index", "Mixtral-int8", 500),
    ("weights", "Llama-int8", 200),
    ("bundled", "Llama-f32", 300),
    ("special", "Llama-f32", 100),
    ("template", "Llama-f32", 200),
    ("program", "Llama-f32", 500),
    ("program", "Gemma2-f32", 500),
    ("program", "GPT2-f32", 500),
    ("program", "Llama-int8", 500),
    ("program", "Llama-int4", 300),
    ("program", "Mixtral-int8", 600),
    ("program", "Mixtral-offsets", 300),
    ("program", "Mixtral-int6", 200),
    ("program", "Mixtral-bf16", 300),
    ("program", "Llama-sparse", 300),
    ("program", "Llama-chosen", 300),
    ("weights", "Llama-sparse", 100),
    ("buckets", "Llama-buckets", 150),
]
SIZES = {"num_hidden_layers": 2, "vocab_size": 100, "hidden_size": 32, "intermediate_size": 64}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256}
SMALL: dict[str, dict[str, int]] = {"Llama": SIZES, "Gemma2": SIZES | {"query_pre_attn_scalar": 24}}
SMALL |= {"GPT2": {"n_embd": 32, "n_head": 2, "vocab_size": 100, "n_positions": 256}}
SMALL |= {"Mixtral": SIZES | {"num_local_experts": 4}}
BUNDLES = sorted({folder for subject, folder, _ in CASES if "-" in folder})
ANY_KL = BudgetSection(max_kl=10.0)  # that four bits cost models of 32 channels a lot is none of these tests' matter
OFFSETS = WeightFormat(storage="int4", group_size=32, zero_point=True, activation="int8", activation_group_size=32)
INT4 = OFFSETS.model_copy(update={"zero_point": False})
INT6 = WeightFormat(storage="int6", group_size=16, activation="int8", activation_group_size=16)
FORMATS = {"offsets": OFFSETS, "int4": INT4, "int6": INT6, "sparse": INT4.model_copy(update={"sparsity": "2:4"})}
RECIPES = {
    name: Recipe(
        name=name,
        weights=WeightFormats(default=f, sparsify="magnitude" if f.sparsity != "dense" else None),
        budget=ANY_KL,
    )
    for name, f in FORMATS.items()
}
RECIPES |= {"buckets": Recipe(name="buckets", buckets=BucketsSection(tokens=(16, 64), batch=(1, 4)))}
CHOSEN = ContextOptions(best=32, first=0, last=0, whole_layers=0)
RECIPES |= {"chosen": Recipe(name="chosen", adaptive_context=CHOSEN, budget=ANY_KL)}
"""Recipes that aren't the built-in ones of their names."""
MOST_CRASHES = 5  # after so many there is no need to look for more
SECONDS = 600  # of a worker; each case has its own limit there

SPECIAL = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}

NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v"}
NAMES |= {"self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up"}
NAMES |= {"mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NAMES |= {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def make_subject(folder: Path, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """A checkpoint in one file or in shards, a GGUF file, or a bundle, as the folder's name says; of a tiny model."""
    family, _, recipe = folder.name.partition("-")
    wide = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 128} if family == "kquants" else {}
    model = tiny_model(family if recipe else "Llama", **SMALL[family if recipe else "Llama"] | wide)
    if recipe:
        export(model, folder, recipe=RECIPES.get(recipe, recipe), tokenizer=byte_tokenizer())
    elif family == "checkpoint":
        model.save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    elif family == "shards":
        model.save_pretrained(folder, max_shard_size="40KB")
    else:
        folder.mkdir()
        write_gguf(folder / "tiny.gguf", model, K_QUANTS if family == "kquants" else {})


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with as many tokens as the models have: three special ones, then letters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: SIZES["vocab_size"] - len(SPECIAL)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate([*SPECIAL.values(), *letters])}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    template = "{{ bos_token }}{% for m in messages %}{{ '[' ~ m.role ~ ']' + m['content'] | trim }}{% endfor %}"
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=template, **SPECIAL)


K_QUANTS = {
    "attn_q": gguf.GGMLQuantizationType.Q4_K,
    "attn_k": gguf.GGMLQuantizationType.Q5_K,
    "attn_v": gguf.GGMLQuantizationType.Q6_K,
    "attn_output": gguf.GGMLQuantizationType.IQ4_XS,
    "ffn_gate": gguf.GGMLQuantizationType.Q3_K,
    "ffn_up": gguf.GGMLQuantizationType.Q2_K,
    "ffn_down": Q2_0,
    "token_embd": gguf.GGMLQuantizationType.Q6_K,
    "output": gguf.GGMLQuantizationType.Q1_0,
}
HALVES = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_XS": (0,)}
HALVES |= {"Q1_0": (0,), "Q2_0": (0,)}
"""The offsets of a block's 16-bit floats."""


def random_blocks(kind: gguf.GGMLQuantizationType, rows: int, columns: int) -> npt.NDArray[np.uint8]:
    """Blocks of random codes and small scales: the package that reads these types can't write them."""
    values, size = BLOCK_SIZES[kind]
    blocks = np.random.default_rng(rows).integers(0, 256, (rows, columns // values, size), np.uint8)
    for at in HALVES[kind.name]:
        blocks[..., at : at + 2] = np.float16([0.001]).view(np.uint8)
    return blocks.reshape(rows, -1)


def write_gguf(
    path: Path, model: PreTrainedModel, kinds: Mapping[str, gguf.GGMLQuantizationType] = MappingProxyType({})
) -> None:
    """The model in blocks of Q8_0, some tensors in random ones of another type, with a tokenizer of single bytes."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(chr(33 + i) for i in range(config.vocab_size - 1)), "ab"])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    newer: dict[str, int] = {}  # tensors of a type that the package doesn't know: their columns
    for name, value in model.state_dict().items():
        base = name.removesuffix(".weight")
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", base)
        stored = f"blk.{layer[1]}.{NAMES[layer[2]]}.weight" if layer else f"{NAMES[base]}.weight"
        data = value.detach().float().numpy()
        if (other := kinds.get(stored.removesuffix(".weight").rpartition(".")[2])) is not None:
            blocks = random_blocks(other, *data.shape)
            if other == Q2_0:
                newer[stored] = data.shape[1]
                writer.add_tensor(stored, blocks.view(np.int8))
            else:
                writer.add_tensor(stored, blocks, raw_dtype=other)
            continue
        kind = gguf.GGMLQuantizationType.Q8_0 if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(stored, gguf.quantize(np.ascontiguousarray(data), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    written = bytearray(path.read_bytes())
    for stored, columns in newer.items():  # behind its name: how many dimensions, two of them, its type
        at = written.index(stored.encode()) + len(stored) + 4
        written[at : at + 8], written[at + 16 : at + 20] = struct.pack("<Q", columns), struct.pack("<I", Q2_0)
    path.write_bytes(written)


@pytest.fixture
def subject_folder(folder: str, shared_folder: Path, tiny_model: Callable[..., PreTrainedModel]) -> Path:
    """The folder that is damaged, which the first test that needs it makes for all workers."""
    subject = shared_folder / "mutations" / folder
    with open(shared_folder / f"mutations-{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not subject.exists():
            unfinished = shared_folder / "mutations.unfinished" / folder
            unfinished.parent.mkdir(exist_ok=True)
            make_subject(unfinished, tiny_model)
            subject.parent.mkdir(exist_ok=True)
            unfinished.rename(subject)
    return subject


def run_cases(
    subject: str, source: Path, work: Path, count: int, environment: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], int]:
    """Runs ``count`` cases and returns the problems and the number of refusals."""
    problems: list[str] = []
    first, refused, crashes = 0, 0, 0
    while first < count and crashes < MOST_CRASHES:
        module = f"{__package__}.mutation_worker"
        command = [sys.executable, "-m", module, subject, str(source), str(work / str(first)), str(first)]
        worker = subprocess.run(
            [*command, str(count - first)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment),
            cwd=Path(__file__).parents[2],
        )
        begun = [int(line) for line in worker.stdout.splitlines() if line.isdigit()]
        problems += [
            part.strip() for part in re.findall(r"^case [^\n]*\n(?:(?!\d+\n).*\n)*", worker.stdout, re.MULTILINE)
        ]
        refused += worker.stdout.splitlines().count("refused")
        if worker.returncode == 0:
            break
        crashes += 1
        last = begun[-1] if begun else count
        problems.append(f"case {subject} {last} ended the process ({worker.returncode}):\n{worker.stderr[-3000:]}")
        first = last + 1
    return problems, refused


HOSTILE = {"cpu": 1500, "onnx": 1200, "tvm": 1300, "stablehlo": 1000}
"""Altered bundles to try for each target; half of tvm's and stablehlo's are edits of programs."""


def make_hostile(folder: Path, tiny_model: Callable[..., PreTrainedModel]) -> None:
    """A bundle of all targets that run on a CPU."""
    recipe = Recipe(
        name="hostile",
        tvm=TvmOptions(levels=("v2",)),
        engines=EnginesSection(context=31, requests=2, prompts=1, chunk=16),
        budget=ANY_KL,
    )
    export(
        tiny_model("Llama", **SMALL["Llama"]), folder, recipe=recipe, targets=tuple(HOSTILE), tokenizer=byte_tokenizer()
    )


@pytest.mark.soak
@pytest.mark.parametrize("target", HOSTILE)
def test_hostile_bundles(
    target: str, shared_folder: Path, tmp_path: Path, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """No crash, no hang, no error of another kind, and nothing of others' that --force would delete."""
    folder = shared_folder / "hostile"
    with open(shared_folder / "hostile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            make_hostile(folder, tiny_model)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    problems, refused = run_cases(f"hostile-{target}", folder, tmp_path, HOSTILE[target], cache)
    assert not problems, "\n\n".join(problems[:5])
    assert HOSTILE[target] // 3 < refused < HOSTILE[target]


@pytest.mark.matrix
@pytest.mark.parametrize(("subject", "folder", "count"), CASES)
def test_damaged_files(subject: str, count: int, subject_folder: Path, tmp_path: Path) -> None:
    problems, refused = run_cases(subject, subject_folder, tmp_path, count)
    assert not problems, "\n\n".join(problems[:5])
    assert count // 10 < refused <= count  # most damage is found, and some of it may be harmless


def test_programs_of_another_meaning(tiny_bundle: Path, tmp_path: Path) -> None:
    """A sample of what the soak does under sanitizers."""
    problems, refused = run_cases("meaning", tiny_bundle, tmp_path, 60)
    assert not problems, "\n\n".join(problems[:5])
    assert 20 < refused < 60


@pytest.fixture(scope="module")
def sanitized(shared_folder: Path) -> dict[str, str]:
    """The environment of a process whose extension is built with ASan and UBSan (ten minutes, once)."""
    build = shared_folder / "sanitized"
    with open(shared_folder / "sanitized.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        root, python = Path(__file__).parents[2], f"-DPython_EXECUTABLE={sys.executable}"
        options = ["-DEW_SANITIZE=address,undefined", "-DSKBUILD=ON", "-DEW_AVX512=OFF", python]
        subprocess.run(["cmake", "-S", root, "-B", build, *options], check=True, capture_output=True)
        subprocess.run(["cmake", "--build", build, "--target", "_cpu"], check=True, capture_output=True)
    (extension,) = build.glob("plugins/native/_cpu*.so")
    libraries = [
        subprocess.run(["g++", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    return {EXTENSION: str(extension), "LD_PRELOAD": " ".join(libraries), "ASAN_OPTIONS": "detect_leaks=0"}


@pytest.mark.soak
@pytest.mark.parametrize("folder", BUNDLES)
def test_programs_of_another_meaning_under_sanitizers(
    subject_folder: Path, sanitized: dict[str, str], tmp_path: Path
) -> None:
    problems, refused = run_cases("meaning", subject_folder, tmp_path, -(-2000 // len(BUNDLES)), sanitized)
    assert not problems, "\n\n".join(problems[:5])
    assert refused > 50


def test_what_may_not_be_is_seen(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    problems, refused = run_cases("faulty", tmp_path / "source", tmp_path, 25)
    text = "\n".join(problems)
    assert "ended the process (-6)" in text and "ValueError: not ours" in text and "MemoryError" in text
    assert 0 < refused < 25 and "EnginewrightError" not in text


def test_there_are_enough() -> None:
    assert sum(count for _, _, count in CASES) >= 10_000
