from __future__ import annotations

import pytest

from enginewright.optimizer.measure.windows import Windows, plan_windows, split_prefix, spread
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.bundle.tokenizer_files import TokenizerFiles
from enginewright.runtime.shared.errors import RequestError
from enginewright.runtime.text.tokenizer import Tokenizer


@pytest.mark.parametrize("prefix", [(), (7,)])
@pytest.mark.parametrize(("size", "stride"), [(8, 1), (8, 4), (8, 7), (512, 256)])
@pytest.mark.parametrize("tokens", [2, 7, 8, 9, 12, 100])
def test_every_token_is_scored_once_and_with_context(
    tokens: int, size: int, stride: int, prefix: tuple[int, ...]
) -> None:
    windows = Windows(size, stride, prefix)
    cut = list(windows.cut(tokens))
    scored = [i for w in cut for i in range(w.first, w.stop)]
    assert scored == list(range(0 if prefix else 1, tokens))
    assert windows.count(tokens) == len(cut)
    for i, w in enumerate(cut):
        assert w.start == i * stride
        assert w.stop - w.start <= size
        assert w.first < w.stop
        if i:
            assert w.first - w.start >= size - stride  # so many tokens stand before it


def test_a_text_of_one_window_is_not_cut() -> None:
    assert len(list(Windows(8, 2).cut(8))) == 1
    assert len(list(Windows(8, 2).cut(9))) == 2


def test_defaults_follow_the_context() -> None:
    assert plan_windows(None, None, 8192, ()) == Windows(512, 256)
    assert plan_windows(None, None, 100, ()) == Windows(100, 50)
    assert plan_windows(None, None, 8192, (1,)) == Windows(511, 256, (1,))
    assert plan_windows(2, None, 8192, ()) == Windows(2, 1)


@pytest.mark.parametrize(
    ("window", "stride", "named"),
    [(1, None, "window: 1"), (101, None, "window: 101"), (0, None, "window"), (8, 0, "stride: 0"), (8, 8, "stride: 8")],
)
def test_what_is_out_of_range_is_named(window: int, stride: int | None, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        plan_windows(window, stride, 100, ())


@pytest.mark.parametrize(
    ("count", "available", "indices"),
    [(3, 35, [0, 11, 23]), (3, 3, [0, 1, 2]), (3, 2, [0, 1]), (1, 9, [0]), (35, 35, list(range(35)))],
)
def test_some_windows_are_spread_over_the_text(count: int, available: int, indices: list[int]) -> None:
    assert spread(count, available) == indices


def test_with_a_prefix_windows_may_touch() -> None:
    assert plan_windows(8, 7, 100, (1,)) == Windows(7, 7, (1,))
    with pytest.raises(RequestError, match="stride"):
        plan_windows(8, 8, 100, (1,))


def test_the_prefix_is_what_the_tokenizer_puts_before_a_text(tiny_bundle: object) -> None:
    files = Bundle.open(str(tiny_bundle)).tokenizer_files()
    plain = Tokenizer(files)
    assert split_prefix(plain, "ab") == ((), plain.encode("ab"))
    both = {**files.special_tokens, "add_bos": True, "add_eos": True}
    tokenizer = Tokenizer(TokenizerFiles(files.tokenizer_json, files.chat_template, both))
    assert tokenizer.encode("ab") == [1, *plain.encode("ab"), 2]
    assert split_prefix(tokenizer, "ab") == ((1,), plain.encode("ab"))
