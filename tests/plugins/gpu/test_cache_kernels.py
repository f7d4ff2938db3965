"""Writing the paged cache in Triton's interpreter against the references."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install 'enginewright[triton]'")

from tests.plugins.gpu import cases


@pytest.mark.parametrize("cache", ["same", "int8", "fp8"])
@pytest.mark.parametrize(
    ("dtype", "tokens", "heads", "size"), [("f32", 5, 3, 80), ("f16", 40, 1, 64), ("bf16", 9, 2, 24)]
)
def test_the_cache_holds_what_the_reference_writes(interpreter, cache, dtype, tokens, heads, size):
    stored = dtype if cache == "same" else cache
    results = interpreter.submit(cases.write, dtype, stored, tokens, heads, size).result()
    want, got = results[: len(results) // 2], results[len(results) // 2 :]
    assert len(want) == (2 if cache == "same" else 4)
    for w, g in zip(want, got, strict=True):
        assert torch.equal(w, g)


@pytest.mark.parametrize("cache", ["f32", "bf16", "int8", "fp8"])
def test_values_in_keys_are_not_written(interpreter, cache):
    results = interpreter.submit(cases.write_keys, "bf16" if cache == "bf16" else "f32", cache, 9, 40, 24).result()
    want, got = results[: len(results) // 2], results[len(results) // 2 :]
    assert len(want) == (2 if cache in ("int8", "fp8") else 1)
    assert all(map(torch.equal, want, got))


def test_every_code_of_e4m3_and_every_tie_between_two(interpreter):
    representable = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    representable = representable[~representable.isnan()].sort().values
    values = torch.cat((representable, (representable[1:] + representable[:-1]) / 2))
    values = torch.cat((values, torch.nextafter(values, torch.tensor(500.0)).clamp(max=448.0)))
    heads = torch.nn.functional.pad(values, (0, -len(values) % 63)).view(-1, 63)
    heads = torch.nn.functional.pad(heads, (0, 1), value=448.0)  # so that scales are 1
    codes, scales = interpreter.submit(cases.codes, heads.tolist(), "fp8").result()
    assert set(scales) == {1.0}
    assert torch.equal(torch.tensor(codes), heads.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("cache", ["int8", "fp8"])
def test_heads_that_have_no_scale(interpreter, cache):
    nan, infinity = float("nan"), float("inf")
    heads = [[0.0] * 16, [1e-40] * 16, [1.0] * 15 + [nan], [1.0] * 15 + [-infinity], [nan] * 16]
    codes, scales = interpreter.submit(cases.codes, heads, cache).result()
    assert not torch.tensor(codes).any()
    assert scales[:2] == [0, 0] and torch.tensor(scales[2:]).isnan().all()


def test_slots_outside_the_cache_are_left_out(interpreter):
    assert interpreter.submit(cases.left_out, 2).result()
