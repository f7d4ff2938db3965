"""Makes the files that engines read of a model, once: python -m peers.make_models MODEL FOLDER [--kinds KIND ...]

Everything starts from one GGUF: a real model's, or one with random weights (``peers.shapes``) and SmolLM2's tokenizer.
Of it come ``hf`` (a Hugging Face folder for those that convert), ``f16``, ``q8_0`` and ``q4_0`` (GGUF; in q4_0 the
table of tokens, which is the head too, has 8 bits, as our recipe int4 has), the file itself by its type, and
``reference`` (logits of the package's text in float32, by transformers). Other types of GGUF files llama.cpp makes
(``peers.quantize``).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from enginewright.optimizer.capture.capture_model import build_from_gguf
from enginewright.optimizer.capture.gguf.file import open_gguf
from peers.convert_gguf import architecture_of, convert_gguf, copy_metadata, write_tensors
from peers.engines import STORED
from peers.loading import REPOSITORY, load_module
from peers.models import MODELS, TEXT_TOKENS
from peers.shapes import Shape

SEED = 0
STD = 0.02
KINDS = ("hf", "f16", "q8_0", "q4_0", *STORED, "reference")


def fetched_gguf(model: str) -> Path:
    """A real model, fetched once."""
    path: Path = load_module("fetch_model", REPOSITORY / "examples" / "fetch_model.py").fetch(model)
    return path


def random_gguf(shape: Shape, target: Path) -> Path:
    """A file of random weights in bfloat16, with SmolLM2's tokenizer and other metadata."""
    source = gguf.GGUFReader(fetched_gguf("smollm2"))
    unfinished = target.with_suffix(".unfinished")
    writer = gguf.GGUFWriter(unfinished, shape.architecture)
    copy_metadata(source, writer, {"general.name": "random weights"}, without=f"{architecture_of(source)}.")
    for name, value in shape.keys.items():
        kind = gguf.GGUFValueType.get_type(value) if not isinstance(value, int) else gguf.GGUFValueType.UINT32
        writer.add_key_value(f"{shape.architecture}.{name}", value, kind)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    random = np.random.default_rng(SEED)
    write_tensors(
        writer, shape.tensors, lambda name: random_values(name, shape.tensors[name], random), lambda _: "BF16"
    )
    os.replace(unfinished, target)
    return target


def random_values(name: str, size: tuple[int, ...], random: np.random.Generator) -> npt.NDArray[np.float32]:
    """Values like those that models are trained from: states forget within 1 to 1,000 tokens."""
    if name.endswith("ssm_a"):
        return -random.uniform(1, 16, size).astype(np.float32)
    if name.endswith("ssm_dt.bias"):  # the inverse of softplus, which makes 0.001 to 0.1 of it
        return np.log(np.expm1(np.exp(random.uniform(np.log(1e-3), np.log(0.1), size)))).astype(np.float32)
    if name.endswith(("norm.weight", "ssm_d")):
        return np.ones(size, np.float32)
    if name.endswith(".bias"):
        return np.zeros(size, np.float32)
    std = 0.5 if name.endswith("ssm_conv1d.weight") else STD
    return random.standard_normal(size, np.float32) * np.float32(std)


def source_gguf(model: str, folder: Path) -> Path:
    """The file that everything else is made from."""
    if not MODELS[model].random:
        return fetched_gguf(model)
    path = folder / "source.gguf"
    return path if path.exists() else random_gguf(MODELS[model].sizes, path)


def hf_folder(source: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The weights of a GGUF as a Hugging Face folder with its tokenizer."""
    if (target / "config.json").exists():
        return target
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    if architecture_of(gguf.GGUFReader(source)) in GGUF_SUPPORTED_ARCHITECTURES:
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        AutoTokenizer.from_pretrained(**where).save_pretrained(unfinished)
        read = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
        # What was read from blocks is not saved as such; a model of the same configuration and weights is.
        config = type(read.config)(**{k: v for k, v in read.config.to_dict().items() if k != "quantization_config"})
        weights = read.state_dict()
    else:  # read by us, as transformers can't
        where = {"pretrained_model_name_or_path": str(fetched_gguf("smollm2").parent)}
        AutoTokenizer.from_pretrained(**where, gguf_file=fetched_gguf("smollm2").name).save_pretrained(unfinished)
        config, weights = evaluated(source)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(weights)
    plain.save_pretrained(unfinished)
    os.replace(unfinished, target)
    return target


def evaluated(source: Path) -> tuple[PretrainedConfig, dict[str, torch.Tensor]]:
    """The configuration and the weights of a GGUF, as our reader has them."""
    model, weights = build_from_gguf(open_gguf(source))
    return model.config, {name: weight.evaluate() for name, weight in weights.items()}


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
