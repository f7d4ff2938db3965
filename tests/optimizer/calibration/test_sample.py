from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.calibration import sample
from enginewright.optimizer.calibration.sample import SHORTEST, sample_sequences
from enginewright.optimizer.capture.model_info import model_info
from enginewright.optimizer.measure.source_runner import SourceRunner
from enginewright.runtime.shared.errors import UnsupportedModelError
from enginewright.runtime.shared.progress import ProgressEvent
from tests.acceptance.tiny_configs import tiny_family


def sampled(
    model: PreTrainedModel,
    tokens: int = 96,
    length: int = 24,
    seed: int = 0,
    keep_bytes: int = 1 << 30,
    cache_bytes: int | None = None,
    events: list[ProgressEvent] | None = None,
) -> tuple[torch.Tensor, ...]:
    events = [] if events is None else events
    events.clear()
    drawn = sample_sequences(
        SourceRunner(model, keep_bytes=keep_bytes),
        model_info(model, "tiny", 512, {}, None),
        tokens=tokens,
        sequence_length=length,
        seed=seed,
        stage="calibration",
        progress=events.append,
        cache_bytes=cache_bytes,
    )
    calls = [(event.done, event.total) for event in events]
    assert calls == sorted(calls)
    assert {event.stage for event in events} == {"calibration"}
    assert calls[-1][0] == calls[-1][1] == sum(len(s) for s in drawn)
    return drawn


@pytest.mark.parametrize("family", ["Llama", "GPT2", "Gemma2"])
@pytest.mark.parametrize(("tokens", "length"), [(96, 24), (100, 16)])
def test_sequences_of_a_length(
    family: str, tokens: int, length: int, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    drawn = sampled(tiny_model(family), tokens, length)
    assert [s.shape for s in drawn] == [(length,)] * -(-tokens // length)
    assert all(s.dtype == torch.int32 and s.min() >= 0 and s.max() < 256 for s in drawn)
    assert all(s[0] == 1 for s in drawn)  # the BOS
    assert len({int(s[1]) for s in drawn[1::2]}) > 1  # spread by what is drawn behind it


def test_the_seed_alone_decides(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("Llama")
    first = torch.stack(sampled(model))
    torch.manual_seed(1)
    assert torch.equal(first, torch.stack(sampled(model)))
    assert torch.equal(first, torch.stack(sampled(model, keep_bytes=0)))
    assert not torch.equal(first, torch.stack(sampled(model, seed=1)))


def test_tokens_follow_the_model_s_distribution(tiny_model: Callable[..., PreTrainedModel]) -> None:
    """Not uniform draws: their mean log-likelihood is that of the model's own entropy, which is far from uniform."""
    model = tiny_model("Llama")
    with torch.no_grad():
        model.lm_head.weight.mul_(4)  # a decided model
        rows = torch.stack(sampled(model, tokens=1024, length=64))[:, 2:].long()
        ids = torch.stack(sampled(model, tokens=1024, length=64)).long()
        logits = model(input_ids=ids, use_cache=False).logits[:, 1:-1].log_softmax(-1)
    likelihood = logits.gather(-1, rows[..., None]).mean()
    entropy = -(logits.exp() * logits).sum(-1)
    # Standard error of the mean over 992 draws is the deviation of a draw's surprise over 31; five of those.
    assert abs(likelihood + entropy.mean()) < 5 * float(logits.gather(-1, rows[..., None]).std()) / 31
    assert entropy.mean() < 4.5  # of 5.5 of uniform ones


def test_a_large_model_gets_short_sequences(
    tiny_model: Callable[..., PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("Llama")
    bytes_of_weights = 4 * sum(p.numel() for p in model.parameters())
    monkeypatch.setattr(sample, "MOST_READ", 12 * bytes_of_weights)
    assert [len(s) for s in sampled(model, keep_bytes=0)] == [12] * 8
    monkeypatch.setattr(sample, "MOST_READ", bytes_of_weights)
    assert [len(s) for s in sampled(model, keep_bytes=0)] == [SHORTEST] * 12
    assert [len(s) for s in sampled(model)] == [24] * 4  # one that fits into memory
    # A token's keys and values: 2 layers of 2 heads of 16, twice, in 4 bytes.
    assert [len(s) for s in sampled(model, keep_bytes=0, cache_bytes=3 * SHORTEST * 512)] == [SHORTEST] * 3
    monkeypatch.undo()
    assert [len(s) for s in sampled(model, cache_bytes=1)] == [24] * 4  # one by one


def test_a_model_of_nan_gives_no_tokens(tiny_model: Callable[..., PreTrainedModel]) -> None:
    model = tiny_model("Llama")
    model.lm_head.weight.data *= 1e38
    model.model.norm.weight.data *= 1e10
    with pytest.raises(UnsupportedModelError, match="not finite"):
        sampled(model)


@pytest.mark.parametrize("family", ["llama", "mamba", "falcon_mamba", "lfm2", "falcon_h1", "zamba2"])
def test_a_cache_changes_no_token(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_family(family)
    drawn, one_by_one = sampled(model), sampled(model, cache_bytes=1)
    assert [len(s) for s in one_by_one] == [24] * 4
    monkeypatch.setattr(sample, "_cache_of", lambda model: None)
    # Draws of the same seed, from logits that differ by rounding alone.
    assert torch.equal(torch.stack(drawn), torch.stack(sampled(model)))


def test_a_model_without_a_cache_gets_short_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers has no cache of this family, and none without a layer that attends for the other."""
    monkeypatch.setattr(sample, "LONGEST_UNCACHED", 16)
    events: list[ProgressEvent] = []
    for model in (tiny_family("openai-gpt"), tiny_family("qwen3_next", layer_types=["linear_attention"] * 2)):
        assert [len(s) for s in sampled(model, events=events)] == [16] * 6
        assert events[-1].detail == "sampled from the model, seed 0, slowly: transformers has no cache for it"
    sampled(tiny_family("qwen3_next"), events=events)
    assert events[-1].detail == "sampled from the model, seed 0"


def test_states_take_memory_of_each_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """lfm2 has a convolution of 3 tokens of 64 channels, and a layer with keys and values of 2 heads of 16."""
    model = tiny_family("lfm2")
    monkeypatch.setattr(sample, "MOST_READ", 0)
    of_sequence = 4 * (3 * 64 + SHORTEST * 2 * 2 * 16)
    assert len(sampled(model, keep_bytes=0, cache_bytes=3 * of_sequence)) == 3
    assert len(sampled(model, keep_bytes=0, cache_bytes=3 * of_sequence - 1)) == 2
