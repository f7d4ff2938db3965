from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from enginewright.optimizer.export import export
from enginewright.optimizer.shared.storage import kind_of, layer_of, stored_weights
from enginewright.runtime.bundle.reader import Bundle


@pytest.mark.matrix
@pytest.mark.parametrize(("recipe", "tied"), [("f32", True), ("int8", False)])
def test_every_byte_is_somewhere(
    recipe: str, tied: bool, tiny_model: Callable[..., PreTrainedModel], tmp_path: Path
) -> None:
    export(tiny_model("Llama", tie_word_embeddings=tied), tmp_path / "a.bundle", recipe=recipe)
    bundle = Bundle.open(tmp_path / "a.bundle")
    parts = stored_weights(bundle)
    assert sum(part.nbytes for part in parts) == sum(
        t.bytes for n, t in bundle.index.stored_once().items() if not n.endswith("put_scale")
    )
    in_layers = {part.layer: {p.kind for p in parts if p.layer == part.layer} for part in parts}
    assert set(in_layers) == {None, 0, 1}
    assert in_layers[0] == in_layers[1] >= {"self_attn.q_proj+k_proj+v_proj", "mlp.down_proj", "input_layernorm"}
    assert ("lm_head and model.embed_tokens" in in_layers[None]) == tied
    down = {p.dtype: p.nbytes for p in parts if (p.layer, p.kind) == (1, "mlp.down_proj")}
    assert down == ({"f32": 64 * 128 * 4} if recipe == "f32" else {"i8": 64 * 128, "f16": 64 * 128 // 32 * 2})


def test_places() -> None:
    assert layer_of("model.layers.12.mlp.down_proj") == 12
    assert layer_of("transformer.h.3") == 3
    assert layer_of("lm_head") is None
    assert layer_of("model.layer2.conv") is None
    assert kind_of("model.layers.12.mlp.down_proj") == "mlp.down_proj"
    assert kind_of("model.layers.1.input_layernorm + model.layers.0") == "input_layernorm"
    assert kind_of("m.layers.0.attn.q + m.layers.0.attn.k") == "attn.q + attn.k"
    assert kind_of("lm_head") == "lm_head"
