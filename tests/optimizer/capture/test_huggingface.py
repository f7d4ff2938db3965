"""Model directories: what is read, and what is refused with the file's name."""

from __future__ import annotations

import json
import struct

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from enginewright.optimizer.capture import capture
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError

from .test_trace import TOLERANCE, eager_logits, step_inputs


@pytest.fixture
def directory(tiny_model, tmp_path):
    path = tmp_path / "tiny"
    tiny_model("Llama").save_pretrained(path)
    return path


def same_logits(model, captured, tolerance=TOLERANCE):
    sequences = [torch.randint(3, 250, (n,)) for n in (4, 7)]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **tolerance)


@pytest.mark.parametrize("family", ["Llama", "GPT2", "GPTNeoX"])  # GPT-NeoX's head has another name on disk
@pytest.mark.parametrize("shards", [1, 3])
def test_directory_equals_model(tiny_model, tmp_path, family, shards):
    model = tiny_model(family)
    size = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(tmp_path, max_shard_size=size // shards + 1000)
    assert (tmp_path / "model.safetensors.index.json").exists() is (shards > 1)
    captured = capture(tmp_path)
    same_logits(model, captured)
    info = captured.model_info
    assert (info.vocab_size, info.context_length, info.eos_token_ids, info.bos_token_id) == (256, 512, (2,), 1)
    assert info.parameters == sum(p.numel() for p in model.parameters())
    assert info.architecture == type(model).__name__
    assert info.name == tmp_path.name
    assert captured.tokenizer_files is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_16_bit_weights_are_widened(tiny_model, tmp_path, dtype):
    tiny_model("Qwen2").to(dtype).save_pretrained(tmp_path)
    widened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    same_logits(widened.eval(), capture(str(tmp_path)))


def test_tied_weights(tiny_model, tmp_path):
    model = tiny_model("Qwen2", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    same_logits(model, capture(tmp_path))


def test_weights_are_read_lazily(directory):
    captured = capture(directory)
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(directory / "model.safetensors")
    path = directory / "model.safetensors"
    start = path.read_bytes().index(tensors[name].numpy().tobytes()[:64])
    with path.open("r+b") as handle:  # in place: the mapping sees it, had the value not been read already
        handle.seek(start)
        handle.write(struct.pack("<f", 42.0))
    assert captured.program.weights[name].evaluate()[0, 0] == 42.0


def test_generation_settings(directory):
    settings = {
        "temperature": 0.6,
        "top_p": 0.95,
        "repetition_penalty": 1.1,
        "do_sample": True,
        "eos_token_id": [7, 2],
        "max_new_tokens": 5,
    }
    (directory / "generation_config.json").write_text(json.dumps(settings))
    info = capture(directory).model_info
    assert info.eos_token_ids == (7, 2)
    assert info.generation_defaults == {"temperature": 0.6, "top_p": 0.95, "repetition_penalty": 1.1, "do_sample": True}


def edit_json(path, **changes):
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in (raw | changes).items() if v is not None}))


def test_missing_directory(tmp_path):
    with pytest.raises(SourceError, match="nowhere doesn't exist"):
        capture(tmp_path / "nowhere")


def test_empty_directory(tmp_path):
    with pytest.raises(SourceError, match="is empty"):
        capture(tmp_path)


def test_no_config(directory):
    (directory / "config.json").unlink()
    with pytest.raises(SourceError, match=r"has no config\.json"):
        capture(directory)


@pytest.mark.parametrize("text", ["{", "[1]", ""])
def test_config_that_is_no_json(directory, text):
    (directory / "config.json").write_text(text)
    with pytest.raises(SourceError, match=r"config\.json"):
        capture(directory)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": None}, SourceError, "model_type is missing"),
        ({"model_type": "no-such-model"}, UnsupportedModelError, "'no-such-model'"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, UnsupportedModelError, "auto_map"),
        (
            {"quantization_config": {"bits": 4}},
            UnsupportedModelError,
            "quantized already, and quant_method doesn't say by which method",
        ),
        ({"quantization_config": {"quant_method": "hqq"}}, UnsupportedModelError, "quantized already by hqq"),
        (
            {"quantization_config": {"quant_method": "awq", "version": "gemv"}},
            UnsupportedModelError,
            r"(?s)config\.json: quantization_config\.version is 'gemv'.*Export from the original checkpoint",
        ),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            SourceError,
            r"config\.json: quantization_config says that the weights are quantized \(GPTQ\), and none is",
        ),
        ({"hidden_size": "many"}, SourceError, "hidden_size"),
        ({"intermediate_size": 96}, SourceError, r"mlp\.\w+\.weight has shape \(\d+, \d+\).*\(\d+, \d+\)"),
        ({"architectures": {"a": 1}}, SourceError, "architectures is {'a': 1}, and no list"),
        ({"pad_token_id": 5000}, UnsupportedModelError, "Padding_idx"),
        ({"architectures": [3]}, SourceError, r"architectures is \[3\], and no list"),
        ({"num_attention_heads": 0, "head_dim": None}, SourceError, "division"),
        ({"pad_token_id": json.loads("[" * 900 + "]" * 900)}, SourceError, "recursion"),
        ({"num_hidden_layers": 3}, SourceError, r"model\.layers\.2\..* is missing"),
        ({"num_hidden_layers": 1}, SourceError, r"model\.layers\.1\..* has no place"),
    ],
)
def test_config_that_is_wrong(directory, changes, error, message):
    edit_json(directory / "config.json", **changes)
    with pytest.raises(error, match=message):
        capture(directory)


def test_no_weights(directory):
    (directory / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        capture(directory)


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
        {"model_type": "vit", "architectures": ["ViTForImageClassification"]},
        {"model_type": "clip", "architectures": ["CLIPModel"]},
    ],
)
def test_what_is_no_decoder_is_said_before_weights_are_asked_for(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    named = config["architectures"][0]
    with pytest.raises(UnsupportedModelError, match=f"{named} isn't a decoder-only language model"):
        capture(tmp_path)


def test_an_adapter_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base", "peft_type": "LORA"}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(SourceError, match=r"(?s)is a LoRA adapter of some/base.*optimize export MODEL --lora"):
        capture(tmp_path)


def test_a_bundle_is_one_already(tmp_path):
    bundle = tmp_path / "a model.bundle"
    bundle.mkdir()
    (bundle / "manifest.json").write_text("{}")
    with pytest.raises(SourceError, match=r"(?s)is a bundle already.*optimize generate '.*a model\.bundle' PROMPT"):
        capture(bundle)


def test_pickles_are_never_loaded(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(SourceError, match=r"pytorch_model\.bin.*never loaded"):
        capture(directory)


@pytest.mark.parametrize("keep", [0, 4, 100, 20000])
def test_truncated_weights(directory, keep):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(SourceError, match=r"model\.safetensors: damaged or truncated"):
        capture(directory)


def test_overlapping_tensors(directory):
    path = directory / "model.safetensors"
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = [n for n in header if n.endswith("q_proj.weight")]
    header[names[1]]["data_offsets"] = header[names[0]]["data_offsets"]
    text = json.dumps(header).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])
    with pytest.raises(SourceError, match=r"model\.safetensors: damaged or truncated"):
        capture(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), r"model\.norm\.weight is missing.*\(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"model\.norm\.weight has shape \(63,\).*\(64,\)"),
        (
            lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}),
            r"model\.norm\.weight is torch\.int8",
        ),
        (
            lambda t: t.update({"model.layers.0.mlp.up_proj.weight_scale": torch.ones(1)}),
            r"up_proj\.weight_scale has no place",
        ),
    ],
)
def test_tensors_that_do_not_fit(directory, change, message):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(SourceError, match=message):
        capture(directory)


def test_shards_that_are_missing_or_elsewhere(tiny_model, tmp_path):
    tiny_model("Llama").save_pretrained(tmp_path, max_shard_size=200_000)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map["model.norm.weight"]
    (tmp_path / shard).rename(tmp_path / "away")
    with pytest.raises(SourceError, match=f"{shard} is missing"):
        capture(tmp_path)
    (tmp_path / "away").rename(tmp_path / shard)
    other = next(s for s in weight_map.values() if s != shard)
    edit_json(index, weight_map=weight_map | {"model.norm.weight": other})
    with pytest.raises(SourceError, match=rf"{other}: tensor model\.norm\.weight is missing"):
        capture(tmp_path)
    edit_json(index, weight_map=weight_map | {"model.norm.weight": "../elsewhere.safetensors"})
    with pytest.raises(SourceError, match=r"model\.norm\.weight is in '\.\./elsewhere\.safetensors'"):
        capture(tmp_path)
    edit_json(index, weight_map=None)
    with pytest.raises(SourceError, match="weight_map is missing"):
        capture(tmp_path)


def test_one_file_of_a_directory(directory):
    with pytest.raises(SourceError, match=r"model\.safetensors isn't a GGUF file"):
        capture(directory / "model.safetensors")


@pytest.mark.parametrize("shards", [1, 2])
def test_a_tensor_of_another_shape_is_named_with_its_file(shards, tiny_model, tmp_path):
    size = "100GB" if shards == 1 else "100KB"
    tiny_model("Llama").save_pretrained(tmp_path, max_shard_size=size)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) == 1) == (shards == 1)
    config = json.loads((tmp_path / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"tensor model\.layers\.0\.mlp\.\w+\.weight has shape .*128.*96") as caught:
        capture(tmp_path)
    named = next(f for f in files if caught.value.message.startswith(f"{f}: "))
    name = caught.value.message.split()[2]
    with safe_open(str(named), framework="pt") as handle:
        assert name in handle.keys()  # noqa: SIM118  not a mapping
