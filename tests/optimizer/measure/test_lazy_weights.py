from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from transformers import PreTrainedModel

from enginewright.optimizer.capture.module import read_module_tensors
from enginewright.optimizer.measure.lazy_weights import bring_weights_lazily, load_weights, placeholder
from enginewright.passes.ir.weights import Source, WeightExpr


@dataclass
class Watch:
    """Counts reads, and the bytes of weights that are alive at a time."""

    alive: int = 0
    most: int = 0
    reads: dict[str, int] = field(default_factory=dict)

    def source(self, name: str, value: torch.Tensor) -> Source:
        def read() -> torch.Tensor:
            copy = value.clone()
            size = copy.numel() * copy.element_size()
            self.alive += size
            self.most = max(self.most, self.alive)
            self.reads[name] = self.reads.get(name, 0) + 1
            weakref.finalize(copy, self._gone, size)
            return copy

        return Source(name, tuple(value.shape), value.dtype, read)

    def _gone(self, size: int) -> None:
        self.alive -= size


def blank(model: PreTrainedModel) -> PreTrainedModel:
    twin = type(model)(model.config).eval()
    for parameter in twin.parameters():
        parameter.data.fill_(torch.nan)
    return twin


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "GPT2", "GPTNeoX"])
@pytest.mark.parametrize("bring", [load_weights, bring_weights_lazily])
def test_the_logits_are_the_same(
    family: str, bring: Callable[..., None], tiny_model: Callable[..., PreTrainedModel]
) -> None:
    """Both run the same operations on the same numbers."""
    model = tiny_model(family)
    twin = blank(model)
    bring(twin, read_module_tensors(model))
    ids = torch.arange(3, 43).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(twin(ids).logits, model(ids).logits, rtol=0, atol=0)
        torch.testing.assert_close(twin(ids[:1, :7]).logits, model(ids[:1, :7]).logits, rtol=0, atol=0)


@pytest.mark.parametrize(("hidden", "layers"), [(64, 2), (96, 5)])
def test_no_more_than_a_module_s_weights_are_alive(
    hidden: int, layers: int, tiny_model: Callable[..., PreTrainedModel]
) -> None:
    model = tiny_model("Llama", hidden_size=hidden, num_hidden_layers=layers, tie_word_embeddings=True)
    watch = Watch()
    twin = blank(model)
    bring_weights_lazily(twin, {name: watch.source(name, value) for name, value in model.state_dict().items()})
    assert watch.most == 0
    with torch.inference_mode():
        twin(torch.arange(8).view(1, 8))
    gc.collect()
    assert watch.alive == 0
    assert watch.most == max(4 * p.numel() for p in model.parameters())
    # The tied table is read where it is used: as the embedding and as the head.
    assert watch.reads == dict.fromkeys(model.state_dict(), 1)


class Experts(torch.nn.Module):
    """Reads its parameter in a loop, and its neighbour's from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.banks = torch.nn.Parameter(torch.zeros(3, 4, 4))
        self.router = torch.nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in range(3):
            x = x @ self.banks[i] + (x @ self.router.weight.t())[..., :1]
        return x


def test_a_loop_reads_once_and_a_neighbour_can_be_read() -> None:
    plain, lazy, watch = Experts(), Experts(), Watch()
    torch.manual_seed(0)
    for parameter in plain.parameters():
        parameter.data.normal_()
    bring_weights_lazily(lazy, {name: watch.source(name, value) for name, value in plain.state_dict().items()})
    x = torch.randn(2, 4)
    with torch.no_grad():
        torch.testing.assert_close(lazy(x), plain(x), rtol=0, atol=0)
    assert watch.reads == {"banks": 1, "router.weight": 3}
    assert watch.alive == 0
    assert type(lazy).__name__ == "Experts"
    assert isinstance(lazy, Experts)


def test_a_forward_that_fails_frees_its_weights() -> None:
    lazy, watch = Experts(), Watch()
    bring_weights_lazily(lazy, {name: watch.source(name, value) for name, value in Experts().state_dict().items()})
    for _ in range(2):
        with pytest.raises(RuntimeError, match="shape"):
            lazy(torch.ones(2, 5))
    gc.collect()
    assert watch.alive == 0
    assert watch.reads == {"banks": 2}


def test_a_weight_that_cannot_be_read_is_no_placeholder() -> None:
    """Module.__getattr__ answers for a property that raises AttributeError, with a tensor of NaN."""

    def fail() -> torch.Tensor:
        raise AttributeError("gone")

    linear = torch.nn.Linear(3, 2)
    weights: dict[str, WeightExpr] = {n: Source(n, tuple(p.shape), p.dtype, fail) for n, p in linear.named_parameters()}
    bring_weights_lazily(linear, weights)
    with pytest.raises(RuntimeError, match=r"weight .* can't be read"):
        linear(torch.ones(1, 3))


def test_a_placeholder_takes_no_memory() -> None:
    tensor = placeholder(torch.empty(1 << 20, 1 << 20, device="meta"))
    assert tensor.shape == (1 << 20, 1 << 20)
    assert tensor.untyped_storage().nbytes() == 4
    assert tensor[5, 7].isnan()
