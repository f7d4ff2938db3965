"""The text decoder of a model that also takes images or sounds, taken out of its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from enginewright.optimizer.capture import build_from_directory, capture
from enginewright.optimizer.capture.build_model import build_model
from enginewright.optimizer.capture.capture_model import capture_shapes
from enginewright.optimizer.capture.model_source import ModelSource
from enginewright.optimizer.capture.text_part import find_text_part, simplify_rotations
from enginewright.optimizer.export import export
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.optimizer.verify.compare_bundle import check_source
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.shared.errors import RequestError, SourceError, UnsupportedModelError
from tests.acceptance.tiny_configs import MROPE, TEXT, WHOLES, tiny_whole

# Sums in another order, over 2 layers and logits of a few units: some 1e-6.
_ROUNDING = 5e-5


@pytest.fixture
def saved(tmp_path: Path, tiny_folder: Path) -> Callable[..., tuple[PreTrainedModel, Path]]:
    """``saved("gemma3")`` -> the whole model, and its folder with a tokenizer and a chat template."""

    def save(family: str, **fields: Any) -> tuple[PreTrainedModel, Path]:
        whole, folder = tiny_whole(family, **fields), tmp_path / family
        whole.save_pretrained(folder)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            shutil.copy(tiny_folder / name, folder)
        return whole, folder

    return save


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """Gives the tensors of a folder other names; None leaves one out."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    save_file({new: t for name, t in tensors.items() if (new := change(name))}, file, {"format": "pt"})


def reconfigure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize("family", [family for family in WHOLES if family != "llama4"])
def test_logits_are_those_of_the_whole_model_given_text(saved, family, tmp_path):
    whole, folder = saved(family)
    report = export(folder, tmp_path / "text.bundle", recipe="f32", targets=("cpu",), part="text")
    (verification,) = report.verification
    assert verification.random_tokens.max_logit_error < _ROUNDING

    # The export has compared the bundle with the text decoder alone; that is the whole given text and no image.
    ids = torch.randint(3, 259, (2, 23), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = whole(input_ids=ids).logits.numpy()
    np.testing.assert_allclose(SourceRunner(folder).logits(ids), expected, atol=_ROUNDING)
    assert np.abs(expected).max() > 0.5


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["mistral3", "qwen2_vl"])
def test_a_bundle_has_the_tokenizer_the_template_and_names_the_decoder(saved, family, tmp_path, tiny_folder):
    _, folder = saved(family)
    export(folder, tmp_path / "text.bundle", recipe="f32", targets=("cpu",), part="text")
    bundle = Bundle.open(tmp_path / "text.bundle")
    assert bundle.model.architecture == {"mistral3": "MistralForCausalLM", "qwen2_vl": "Qwen2VLTextForCausalLM"}[family]
    files = bundle.tokenizer_files()
    assert files.tokenizer_json
    assert files.chat_template == (tiny_folder / "chat_template.jinja").read_text()
    check_source(bundle, ModelSource(folder))  # later comparisons find the text decoder in the folder by themselves


def test_a_template_in_the_file_of_a_processor_comes_along(saved):
    _, folder = saved("llava")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    files = capture(folder, part="text").tokenizer_files
    assert files is not None and files.chat_template == "{{ messages }}"
    (folder / "chat_template.json").write_text("{}")
    with pytest.raises(SourceError, match=r"chat_template\.json: chat_template is missing"):
        capture(folder, part="text")


@pytest.mark.parametrize("family", WHOLES)
def test_without_a_part_the_model_is_refused_and_the_hint_names_the_flag(family, tmp_path):
    CONFIG_MAPPING[family](**WHOLES[family]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="isn't a decoder-only language model") as caught:
        capture(tmp_path)
    assert caught.value.hint is not None and "--part text" in caught.value.hint


def test_a_text_decoder_that_is_refused_by_itself_is_refused_as_a_part(tmp_path):
    CONFIG_MAPPING["llama4"](**WHOLES["llama4"]).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="is neither causal nor causal within a sliding window"):
        capture_shapes(tmp_path)


@pytest.mark.parametrize(
    ("inside", "head"),
    [
        ("language_model.model.", "language_model.lm_head."),
        ("model.language_model.", "lm_head."),
        ("model.language_model.model.", "model.language_model.lm_head."),
        ("model.", "lm_head."),
        ("thinker.model.", "thinker.lm_head."),
    ],
)
def test_weights_are_found_below_any_prefix(saved, inside, head):
    whole, folder = saved("mistral3")
    text = whole.model.language_model.state_dict()
    other = {f"vision_tower.{name}": t for name, t in whole.model.vision_tower.state_dict().items()}
    tensors = {inside + name: t for name, t in text.items()} | other | {f"{head}weight": whole.lm_head.weight}
    save_file({name: t.detach().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    _, weights = build_from_directory(folder)
    assert len(weights) == len(text) + 1
    for name, t in text.items():
        assert torch.equal(weights[f"model.{name}"].evaluate(), t)
    assert torch.equal(weights["lm_head.weight"].evaluate(), whole.lm_head.weight)


def test_a_tensor_that_is_missing_is_named(saved):
    _, folder = saved("gemma3")
    rename(folder, lambda name: None if name.endswith("layers.1.mlp.up_proj.weight") else name)
    with pytest.raises(SourceError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        capture(folder, part="text")


def test_a_tensor_among_the_decoders_without_a_place_is_named(saved):
    _, folder = saved("gemma3")
    rename(folder, lambda name: name.replace("layers.1.mlp.up_proj", "layers.1.mlp.extra"))
    with pytest.raises(SourceError, match=r"tensor model\.layers\.1\.mlp\.extra\.weight has no place in the model"):
        capture(folder, part="text")


def test_a_checkpoint_of_other_parts_alone_is_refused(saved):
    _, folder = saved("gemma3")
    rename(folder, lambda name: None if "language_model" in name else name.replace("layers", "blocks"))
    with pytest.raises(SourceError, match="no tensor is one of the text decoder Gemma3ForCausalLM"):
        capture(folder, part="text")


@pytest.mark.parametrize("same", [True, False])
def test_a_head_that_differs_from_a_tied_table_counts(saved, same):
    whole, folder = saved("mistral3")
    reconfigure(folder, tie_word_embeddings=True)
    head = whole.lm_head.weight.detach()
    if same:
        table = whole.get_input_embeddings().weight.detach()
        tensors = load_file(folder / "model.safetensors")
        [name] = [name for name in tensors if name.endswith("lm_head.weight")]
        save_file(tensors | {name: table.clone()}, folder / "model.safetensors", {"format": "pt"})
        head = table
    model, weights = build_from_directory(folder)
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == same
    assert torch.equal(weights["lm_head.weight"].evaluate(), head)


def test_special_tokens_of_the_whole_win(saved):
    _, folder = saved("gemma3", eos_token_id=[2, 7])
    (folder / "generation_config.json").unlink(missing_ok=True)
    assert capture(folder, part="text").model_info.eos_token_ids == (2, 7)


@pytest.mark.matrix
def test_a_decoder_is_taken_whole(tiny_folder):
    assert capture(tiny_folder, part="text").model_info == capture(tiny_folder).model_info


@pytest.mark.parametrize(
    "config",
    [
        transformers.LlamaConfig(),
        transformers.CLIPConfig(),
        transformers.T5Config(),
        transformers.LlavaConfig(architectures=["LlavaForSequenceClassification"]),
    ],
    ids=["decoder", "contrastive", "seq2seq", "classifier"],
)
def test_other_models_have_no_such_part(config):
    assert find_text_part(config, "config.json") is None


def test_a_model_whose_text_is_encoded_is_refused_without_such_a_hint():
    config = transformers.Blip2Config(text_config={"model_type": "t5"})
    assert find_text_part(config, "config.json") is None
    with pytest.raises(UnsupportedModelError, match="isn't a decoder-only language model") as caught:
        build_model(config)
    assert caught.value.hint is not None and "--part" not in caught.value.hint


def test_a_scale_of_logits_that_a_head_alone_would_lose_is_refused():
    text = TEXT | {"rope_parameters": MROPE}
    config = CONFIG_MAPPING["qwen2_vl"](text_config=text | {"logit_scale": 0.5})
    with pytest.raises(UnsupportedModelError, match=r"text_config: logit_scale is 0\.5"):
        find_text_part(config, "config.json")
    assert find_text_part(CONFIG_MAPPING["qwen2_vl"](text_config=text | {"logit_scale": 1.0}), "") is not None


def test_a_size_that_no_model_has_is_named_with_its_section():
    config = CONFIG_MAPPING["llava"](text_config=TEXT | {"model_type": "llama", "vocab_size": 1 << 40})
    with pytest.raises(SourceError, match=r"config\.json: text_config: vocab_size is"):
        find_text_part(config, "config.json")


def test_parts_of_model_objects_and_unknown_parts_are_refused(tmp_path, tiny_folder):
    with pytest.raises(UnsupportedModelError, match="a part of a model can be taken of its folder only"):
        capture(tiny_whole("llava"), part="text")
    with pytest.raises(RequestError, match="part: there is no 'vision'"):
        export(tiny_folder, tmp_path / "out.bundle", part="vision")
    assert not (tmp_path / "out.bundle").exists()


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl"])
def test_rotations_of_three_positions_become_those_of_one(family):
    part = find_text_part(CONFIG_MAPPING[family](**WHOLES[family]), "")
    assert part is not None
    model = build_model(part.config, part.model_class)
    before = model.model.rotary_emb
    simplify_rotations(model)
    after = model.model.rotary_emb
    assert after is not before
    positions = torch.tensor([[0, 5, 1000, 30_000]])
    for a, b in zip(before(torch.zeros(1), positions.expand(3, 1, -1)), after(torch.zeros(1), positions), strict=True):
        assert torch.equal(a, b)


def test_a_rotation_with_other_tables_stays():
    part = find_text_part(CONFIG_MAPPING["qwen2_vl"](**WHOLES["qwen2_vl"]), "")
    assert part is not None
    model = build_model(part.config, part.model_class)
    before = model.model.rotary_emb
    before.forward = lambda x, positions: (torch.ones(1, 512, 16), torch.zeros(1, 512, 16))
    simplify_rotations(model)
    assert model.model.rotary_emb is before
