from __future__ import annotations

import pytest
import torch

from enginewright.passes.ir.provenance import Part
from enginewright.passes.ir.weights import Apply, Cast, Concat, Slice, Source, Transpose, WeightStore
from enginewright.runtime.shared.errors import PassError, SourceError

aten = torch.ops.aten


def _source(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Source:
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    return Source(name, shape, dtype, lambda: value)


@pytest.mark.parametrize(("n", "k"), [(3, 4), (6, 2)])
def test_expressions_evaluate_and_know_their_shape(n: int, k: int) -> None:
    a, b = _source("a", n, k), _source("b", n, k)
    va, vb = a.evaluate(), b.evaluate()
    cases = {
        Cast(a, torch.float64): va.double(),
        Slice(a, 1, 1, k): va[:, 1:],
        Concat((a, b)): torch.cat([va, vb]),
        Concat((a, b), 1): torch.cat([va, vb], 1),
        Transpose(a): va.t(),
        Transpose(Slice(Concat((a, b)), 0, 1, n + 1)): torch.cat([va, vb])[1 : n + 1].t(),
        Apply(aten.add.Tensor, (a, 1.0), (), (n, k), torch.float32): va + 1,
        Apply(aten.stack.default, ((a, b),), (("dim", 1),), (n, 2, k), torch.float32): torch.stack([va, vb], 1),
    }
    for expr, value in cases.items():
        assert expr.shape == tuple(value.shape), expr.describe()
        assert expr.dtype == value.dtype
        torch.testing.assert_close(expr.evaluate(), value, rtol=0, atol=0)


def test_provenance() -> None:
    a, b = _source("a", 3, 4), _source("b", 5, 4)
    both = Concat((a, b))
    assert both.parts(0) == (Part("a", 0, 3), Part("b", 0, 5))
    assert Slice(both, 0, 2, 6).parts(0) == (Part("a", 2, 3), Part("b", 0, 3))
    assert Slice(both, 0, 3, 8).parts(0) == (Part("b", 0, 5),)
    assert Slice(both, 1, 1, 3).parts(0) == both.parts(0)
    assert Slice(a, 1, 1, 3).parts(1) == (Part("a", 1, 3, 1),)
    assert Transpose(a).parts(0) == (Part("a", 0, 4, 1),)
    assert Transpose(Transpose(a)).parts(0) == a.parts(0)
    assert Cast(both, torch.float64).parts(0) == both.parts(0)
    scale = _source("scale", 4)
    scaled = Apply(aten.mul.Tensor, (a, scale), (), (3, 4), torch.float32)
    assert scaled.parts(0) == (Part("a", 0, 3), Part("scale", 0, 4))
    assert scaled.parts(1) == (Part("a", 0, 4, 1), Part("scale", 0, 4))
    assert str(Part("a", 1, 3, 1)) == "a[:, 1:3]"


def test_text() -> None:
    a, b = _source("a", 3, 4), _source("b", 3, 4)
    assert Transpose(Cast(a, torch.bfloat16)).describe() == "transpose(cast(a, bfloat16))"
    assert Slice(Concat((a, b)), 0, 1, 2).describe() == "slice(concat(a, b, 0), 0, 1:2)"
    assert Apply(aten.add.Tensor, (a, 1.0), (), (3, 4), torch.float32).describe() == "add.Tensor(a, 1.0)"
    listed = Apply(aten.stack.default, ((a, b),), (("dim", 1),), (3, 2, 4), torch.float32)
    assert listed.describe() == "stack([a, b], dim=1)"


def test_reading_is_lazy_and_checked() -> None:
    reads: list[int] = []

    def read() -> torch.Tensor:
        reads.append(1)
        return torch.zeros(3, 4)

    source = Source("a", (3, 4), torch.float32, read)
    expr = Slice(Concat((source, source)), 0, 2, 5)
    assert not reads
    expr.evaluate()
    assert len(reads) == 2
    with pytest.raises(PassError, match=r"weight a: read torch.float32 \(3, 4\), expected torch.float32 \(4, 3\)"):
        Source("a", (4, 3), torch.float32, read).evaluate()


@pytest.mark.parametrize("bounds", [(2, 2), (-1, 2), (1, 4)])
def test_slices_out_of_bounds(bounds: tuple[int, int]) -> None:
    with pytest.raises(PassError, match="slice"):
        Slice(_source("a", 3, 4), 0, *bounds)


def test_what_does_not_fit() -> None:
    with pytest.raises(PassError, match="can't concatenate"):
        Concat((_source("a", 3, 4), _source("b", 3, 5)))
    with pytest.raises(PassError, match="can't concatenate"):
        Concat((_source("a", 3, 4), _source("b", 3, 4, dtype=torch.float64)))
    with pytest.raises(PassError, match="transpose of a weight of shape"):
        Transpose(_source("a", 3, 4, 5))


def test_equal_expressions_are_equal() -> None:
    a = _source("a", 3, 4)
    assert Slice(a, 0, 0, 2) == Slice(_source("a", 3, 4), 0, 0, 2)
    assert Slice(a, 0, 0, 2) != Slice(a, 0, 0, 3)


def test_store() -> None:
    store = WeightStore()
    a, b = _source("a", 3, 4), _source("b", 3, 4)
    assert store.add("w", a) == "w"
    assert store.add("w", a) == "w"
    assert store.add("w", b) == "w.2"
    assert store.add("v", b) == "v"
    assert list(store) == ["w", "w.2", "v"]
    assert len(store) == 3
    assert "w.2" in store
    assert store["w.2"] is b
    copy = store.copy()
    store.keep_only({"v"})
    assert (list(store), len(copy)) == (["v"], 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e5m2])
@pytest.mark.parametrize("shape", [(3, 5), (7, 64)])
def test_a_tensor_of_a_file_that_is_not_finite_is_named(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    value = torch.ones(shape)
    value[0, 1], value[2, 3], value[2, 4] = torch.nan, torch.inf, -torch.inf
    value = value.to(dtype)
    from_file = Source("model.norm", shape, dtype, lambda: value, origin="model.safetensors")
    with pytest.raises(SourceError, match=r"model.safetensors: tensor model.norm has 1 values .* 2 .* infinite"):
        Cast(from_file, torch.float32).evaluate()
    Source("computed:mask", shape, dtype, lambda: value).evaluate()  # made here: a mask may be infinite
    value = torch.full(shape, 3e4).to(dtype)  # the sum of these is infinite in 16 bits, and they are not
    assert from_file.evaluate() is value


def test_integers_of_a_file_need_no_check() -> None:
    value = torch.arange(3)
    assert Source("ids", (3,), torch.int64, lambda: value, origin="x").evaluate() is value


@pytest.mark.parametrize("n", [3, 6])
def test_a_number_made_of_a_vector_names_it(n: int) -> None:
    total = Apply(aten.sum.default, (_source("a", n),), (), (), torch.float32)
    grown = Apply(aten.exp.default, (total,), (), (), torch.float32)
    for number in (total, grown):
        assert {p.source for p in number.parts(0)} == {"a"}
