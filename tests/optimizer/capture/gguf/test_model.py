"""GGUF files written here with every type of block, against transformers' own reading of them."""

from __future__ import annotations

from collections import Counter

import gguf
import numpy as np
import pytest
import torch
import transformers

from enginewright.optimizer.capture import capture
from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.gguf import tensors as gguf_tensors
from enginewright.optimizer.capture.gguf.file import open_gguf
from enginewright.optimizer.capture.gguf.header import GgufArray
from enginewright.optimizer.capture.gguf.model import generation_settings, read_tensors
from enginewright.optimizer.export import export
from enginewright.runtime.shared.errors import SourceError, UnsupportedModelError
from tests.optimizer.capture.test_trace import TOLERANCE, eager_logits, step_inputs

Q = gguf.GGMLQuantizationType
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight, heads):
    """Orders the rows of q and k as llama.cpp's converter does, for its interleaved rope."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write(
    model, path, quantization=Q.F32, extra=(), arch="llama", leave_out=(), metadata=(), freq_base=10000.0, blocks=None
):
    """``blocks`` makes the bytes of a tensor's rows of its type and shape, where the package can't quantize to it."""
    config = model.config
    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(freq_base)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for key, value in metadata:
        add = writer.add_string if isinstance(value, str) else writer.add_array if isinstance(value, list) else None
        (add or writer.add_uint32)(key, value)
    for name, value in model.state_dict().items():
        base, _, suffix = name.rpartition(".")
        if base.startswith("model.layers."):
            _, _, layer, rest = base.split(".", 3)
            name = f"blk.{layer}.{NAMES[rest]}.{suffix}"
        else:
            name = f"{NAMES[base]}.{suffix}"
        data = value.numpy()
        if ".attn_q." in name or ".attn_k." in name:
            data = permuted(data, config.num_attention_heads if "attn_q" in name else config.num_key_value_heads)
        if name in leave_out:
            continue
        kind = Q.F32 if data.ndim != 2 else quantization(name) if callable(quantization) else quantization
        data_of_blocks = None if blocks is None or data.ndim != 2 else blocks(kind, data.shape)
        quantized = gguf.quantize(np.ascontiguousarray(data), kind) if data_of_blocks is None else data_of_blocks
        writer.add_tensor(name, quantized, raw_dtype=kind)
    for name, data in extra:
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama(tiny_model):
    return tiny_model("Llama", intermediate_size=96)


@pytest.mark.parametrize("kind", [Q.F32, Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q8_0], ids=lambda q: q.name)
def test_every_type_equals_transformers(llama, tmp_path, kind):
    path = write(llama, tmp_path / "tiny.gguf", kind)
    captured = capture(path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    sequences = [torch.randint(3, 250, (n,)) for n in (4, 7)]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(theirs.eval(), sequences), **TOLERANCE)
    if kind == Q.F32:
        torch.testing.assert_close(got, eager_logits(llama, sequences), **TOLERANCE)
    assert captured.tokenizer_files is None
    assert captured.model_info.name == "tiny"
    parts = captured.program.weights["model.layers.1.self_attn.q_proj.weight"].parts()
    assert [(p.source, p.start, p.stop) for p in parts] == [("blk.1.attn_q.weight", 0, 64)]


def test_tied_output(tiny_model, tmp_path):
    model = tiny_model("Llama", tie_word_embeddings=True)
    captured = capture(write(model, tmp_path / "tied.gguf", leave_out=("output.weight",)))
    sequences = [torch.randint(3, 250, (5,))]
    got = captured.program.evaluate(step_inputs(sequences))[0]
    torch.testing.assert_close(got, eager_logits(model, sequences), **TOLERANCE)


def test_rope_factors_divide_frequencies(llama, tmp_path):
    factors = np.linspace(1, 8, 8).astype(np.float32)
    captured = capture(write(llama, tmp_path / "rope.gguf", extra=[("rope_freqs.weight", factors)]))
    plain = capture(write(llama, tmp_path / "plain.gguf"))
    name = "model.rotary_emb.inv_freq"
    got, want = (c.program.weights[name].evaluate() for c in (captured, plain))
    torch.testing.assert_close(got * torch.from_numpy(factors), want)


def test_blocks_are_read_when_evaluated(llama, tmp_path):
    path = write(llama, tmp_path / "lazy.gguf")
    captured = capture(path)
    row = llama.model.embed_tokens.weight[0, :16].detach().numpy().tobytes()
    start = path.read_bytes().index(row)
    with path.open("r+b") as handle:
        handle.seek(start)
        handle.write(np.float32(42).tobytes())
    assert captured.program.weights["model.embed_tokens.weight"].evaluate()[0, 0] == 42.0


@pytest.mark.parametrize("keep", [4, 20, 300, 0.5, 0.99])
def test_truncated(llama, tmp_path, keep):
    data = write(llama, tmp_path / "tiny.gguf").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: keep if isinstance(keep, int) else int(len(data) * keep)])
    with pytest.raises(SourceError, match=r"cut\.gguf: damaged or truncated") as caught:
        capture(path)
    size = f"it has {path.stat().st_size:,} bytes, and should have "
    assert size in str(caught.value)
    assert "reshape" not in str(caught.value)


@pytest.fixture(scope="module")
def with_vocabulary(llama, tmp_path_factory):
    """A file with a tokenizer of 1,500 tokens, and an array that isn't the tokenizer's."""
    letters = [chr(n) for n in range(33, 33 + 94)]
    tokens = [*letters, *(a + b for a in letters[:40] for b in letters[:40])][:1500]
    metadata = [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", [1] * len(tokens)),
        ("tokenizer.ggml.merges", [f"{t[0]} {t[1]}" for t in tokens[94:]]),
        ("tokenizer.ggml.bos_token_id", 1),
        ("tokenizer.ggml.eos_token_id", 2),
        ("general.tags", ["a", "b"]),
    ]
    return write(llama, tmp_path_factory.mktemp("vocabulary") / "m.gguf", metadata=metadata)


def test_keys_are_those_of_the_packages_reader(with_vocabulary):
    fields = gguf.GGUFReader(str(with_vocabulary)).fields
    file = open_gguf(with_vocabulary)
    assert {f"GGUF.{k}" for k in ("version", "tensor_count", "kv_count")} | set(file.metadata) == set(fields)
    for key, value in file.metadata.items():
        assert (value.read() if isinstance(value, GgufArray) else value) == fields[key].contents(), key
    assert file.array("tokenizer.ggml.tokens")[:3] == ["!", '"', "#"]
    assert file.array("tokenizer.ggml.nothing") is None
    with pytest.raises(SourceError, match=r"m\.gguf: key tokenizer\.ggml\.pre is 'smollm', and no array"):
        file.array("tokenizer.ggml.pre")


@pytest.mark.parametrize("count", [2**60, 100_000])
def test_an_array_longer_than_the_file(llama, tmp_path, count):
    path = write(llama, tmp_path / "m.gguf", metadata=[("tokenizer.ggml.scores", [1.0, 2.0])])
    data = path.read_bytes()
    at = data.index(b"tokenizer.ggml.scores") + len("tokenizer.ggml.scores") + 8
    path.write_bytes(data[:at] + count.to_bytes(8, "little") + data[at + 8 :])
    with pytest.raises(SourceError, match="damaged or truncated"):
        open_gguf(path)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 something else"])
def test_no_gguf(tmp_path, content):
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.gguf isn't a GGUF file"):
        capture(path)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"leave_out": ("blk.1.ffn_up.weight",)}, SourceError, r"model\.layers\.1\.mlp\.up_proj\.weight is missing"),
        ({"extra": [("blk.0.strange", np.ones(3, np.float32))]}, SourceError, r"blk\.0\.strange has no place"),
        ({"extra": [("rope_freqs.weight", np.ones(3, np.float32))]}, SourceError, r"rope_freqs\.weight"),
        ({"metadata": [("llama.rope.scaling.type", "longrope")]}, UnsupportedModelError, r"llama\.rope\.scaling\.type"),
        (
            {"metadata": [("llama.attention.sliding_window", 8)]},
            UnsupportedModelError,
            r"llama\.attention\.sliding_window",
        ),
        ({"metadata": [("llama.residual_scale", 3)]}, UnsupportedModelError, r"llama\.residual_scale is 3"),
        ({"arch": "no-such"}, UnsupportedModelError, "'no-such'"),
    ],
)
def test_files_that_do_not_fit(llama, tmp_path, options, error, message):
    path = write(llama, tmp_path / "wrong.gguf", **options)
    with pytest.raises(error, match=message) as caught:
        capture(path)
    assert "wrong.gguf" in caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "message"), [("block_count", 1000, "block_count is 1000, and there are 2[01]")]
)
def test_sizes_that_do_not_fit(llama, tmp_path, key, value, message):
    path = write(llama, tmp_path / "wrong.gguf")
    data, name = path.read_bytes(), f"llama.{key}".encode()
    at = data.index(name) + len(name) + 4  # behind the value's type
    path.write_bytes(data[:at] + value.to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(SourceError, match=rf"wrong\.gguf: llama\.{message}"):
        capture(path)


def test_another_rotary_width_is_refused(llama, tiny_model, tmp_path):
    file = open_gguf(write(llama, tmp_path / "tiny.gguf", arch="phi3"))  # says 16
    model = build_model(tiny_model("Phi3", partial_rotary_factor=0.5).config)
    with pytest.raises(UnsupportedModelError, match=r"phi3\.rope\.dimension_count is 16.* rotates \[8\] columns"):
        read_tensors(file, model)


def test_tokens_that_no_answer_may_have_are_banned_in_requests(llama, tmp_path):
    tokens = ("tokenizer.ggml.tokens", [f"t{i}" for i in range(256)])
    vocabulary = [("tokenizer.ggml.model", "none"), tokens]
    metadata = [*vocabulary, ("tokenizer.ggml.suppress_tokens", [5, -1, 7, 256])]
    info = capture(write(llama, tmp_path / "tiny.gguf", metadata=metadata)).model_info
    assert info.generation_defaults == {"bad_words": [[5], [7]]}


@pytest.mark.parametrize(
    ("value", "message"), [(["x"], "has 'x', and no token id"), (7, "is 7, and no array"), ([0.5], "has 0.5, and no")]
)
def test_other_values_of_suppress_tokens_are_refused(llama, tmp_path, value, message):
    file = open_gguf(write(llama, tmp_path / "wrong.gguf", metadata=[("tokenizer.ggml.suppress_tokens", value)]))
    with pytest.raises(SourceError, match=rf"wrong\.gguf: .*tokenizer\.ggml\.suppress_tokens {message}"):
        generation_settings(file)


def test_the_real_model(smollm2_gguf):
    captured = capture(smollm2_gguf)
    info = captured.model_info
    assert (info.vocab_size, info.context_length, info.eos_token_ids) == (49152, 8192, (2, 0, 4))  # as llama.cpp has it
    assert info.parameters == 134_515_008
    assert len(captured.program.nodes_of(torch.ops.ew.attention.default)) == 30
    files = captured.tokenizer_files
    assert files is not None and files.tokenizer_json is not None
    assert files.special_tokens["eos_token"] == "<|im_end|>" and files.special_tokens["add_bos"] is False
    assert "<|im_start|>" in (files.chat_template or "")


def test_an_export_dequantizes_a_tensor_three_times(llama, tmp_path, monkeypatch):
    """It does so to measure with, to write it, and to run the source beside the bundle: not again for what passes make
    of it."""
    times = Counter()

    def counted(tensor):
        times[tensor.name] += 1
        return dequantize(tensor)

    dequantize = gguf_tensors.dequantize
    monkeypatch.setattr(gguf_tensors, "dequantize", counted)
    path = write(llama, tmp_path / "tiny.gguf", Q.Q8_0)
    export(path, tmp_path / "tiny.bundle", recipe="f32")
    assert "blk.0.attn_q.weight" in times
    assert max(times.values()) == 3
