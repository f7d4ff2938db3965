"""Prefixes through ``LLM``: found, kept in folders, read by another process, deleted; the answers stay the same."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from enginewright import LLM, RequestError, SamplingParams
from enginewright.runtime.engine.engine import Engine
from enginewright.runtime.engine.prefixes import load_prefix, open_tier, opened_tier, save_prefix
from enginewright.runtime.requests.request import BeamSearch, Branch, Generation
from enginewright.runtime.requests.request_options import RequestOptions
from enginewright.runtime.scheduler.limits import SchedulerConfig
from enginewright.runtime.shared.contracts import ExecutorCaps

LONG = "The sea is large, and the sky above it is larger. " * 4
PARAMS = SamplingParams(max_tokens=6, logprobs=2, temperature=0.8, ignore_eos=True)


@pytest.fixture(autouse=True)
def _key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def opened(bundle: Path, **more: Any) -> LLM:
    return LLM(bundle, threads=1, memory="4MiB", **more)


def plain(bundle: Path, prompt: str) -> Any:
    with opened(bundle, prefix_cache=False) as llm:
        [result] = llm.generate([prompt], PARAMS)
        assert result.num_cached_tokens is None and llm.info()["prefix_cache"] is None
        return result


def test_on_by_default_and_seen(tiny_bundle: Path) -> None:
    with opened(tiny_bundle) as llm:
        [first] = llm.generate([LONG + "a"], PARAMS)
        [second] = llm.generate([LONG + "b"], PARAMS)
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, len(second.prompt_token_ids) - 1)
        assert [first, second] == [plain(tiny_bundle, LONG + end) for end in "ab"]
        use = llm.info()["prefix_cache"]
        assert (use["requests"], use["hits"], use["reused"], use["disk"]) == (2, 1, second.num_cached_tokens, None)
        [blocks] = use["blocks"].values()
        assert blocks["held"] == blocks["unused_tokens"] == 0 and blocks["kept"] > 6


def test_a_tenant_is_an_argument_of_every_call(tiny_bundle: Path) -> None:
    with opened(tiny_bundle) as llm:
        llm.generate([LONG], PARAMS, tenant="one")
        [other] = llm.generate([LONG], PARAMS, tenant="two")
        [same] = llm.generate([LONG], PARAMS, tenant="one")
        assert (other.num_cached_tokens, same.num_cached_tokens) == (0, len(same.prompt_token_ids) - 1)
        chat = [{"role": "user", "content": LONG}]
        "".join(piece.text for piece in llm.stream_chat(chat, PARAMS, tenant="one"))
        cached = [llm.chat(chat, PARAMS, tenant=tenant)[0].num_cached_tokens for tenant in ("two", "one")]
        assert cached[0] < cached[1]
        with pytest.raises(RequestError, match="tenant: 7"):
            llm.generate([LONG], PARAMS, tenant=7)  # type: ignore[arg-type]


def test_a_folder_outlives_the_process(tiny_bundle: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    with opened(tiny_bundle, prefix_folder=folder) as llm:
        llm.generate([LONG + "a"], PARAMS)
    with opened(tiny_bundle, prefix_folder=folder) as llm:
        [result] = llm.generate([LONG + "b"], PARAMS)
        use = llm.info()["prefix_cache"]
        whole = len(result.prompt_token_ids) // 32 * 32
        assert result.num_cached_tokens == use["from_disk"] == whole and use["disk"]["problem"] is None
        assert result == plain(tiny_bundle, LONG + "b")
        assert llm.delete_prefixes(tenant="somebody else") == 0
        assert llm.delete_prefixes(tenant="") > 0 and not list(folder.glob("*.kv"))
        [again] = llm.generate([LONG + "b"], PARAMS)
        assert again.num_cached_tokens == 0


SAVE = """
import sys, json
from enginewright import LLM
with LLM(sys.argv[1], threads=2, memory="4MiB") as llm:
    print(json.dumps(llm.save_prefix(sys.argv[2], sys.argv[3], tenant="me")))
"""


def test_a_prefix_that_another_process_saved(tiny_bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAVE, str(tiny_bundle), LONG, str(tmp_path / "saved")]
    saved = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    with opened(tiny_bundle) as llm:
        assert llm.load_prefix(LONG, tmp_path / "saved") == 0, "another tenant's"
        assert llm.load_prefix(LONG + "more", tmp_path / "saved", tenant="me") == saved >= 192
        assert llm.info()["prefix_cache"]["disk"] is None
        [result] = llm.generate([LONG + "more"], PARAMS, tenant="me")
        assert result.num_cached_tokens == saved and result == plain(tiny_bundle, LONG + "more")
        blocks = llm.info()["prefix_cache"]["blocks"]
        assert all(of["held"] == 0 for of in blocks.values())


def test_a_prefix_of_another_instruction_set_is_computed(tiny_bundle: Path, tmp_path: Path) -> None:
    with opened(tiny_bundle, isa="portable") as llm:
        assert llm.save_prefix(LONG, tmp_path / "saved") >= 192
    with opened(tiny_bundle) as llm:
        assert llm.load_prefix(LONG, tmp_path / "saved") == 0


def test_options_that_make_no_sense(tiny_bundle: Path, tmp_path: Path) -> None:
    for options, message in (
        ({"prefix_folder": 3}, "prefix_folder: 3"),
        ({"prefix_folder": "a\0b"}, r"prefix_folder: 'a\\x00b' isn't a path"),
        ({"prefix_folder": "\ud800"}, r"prefix_folder: '\\ud800' isn't a path"),
        ({"prefix_folder": tmp_path / ("x" * 300)}, "prefix_folder: .* is too long, with .* and 300 in one part"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_days": math.nan}, "prefix_folder_days: nan is out of range"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_days": -1}, "prefix_folder_days: -1 is out of range"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_days": 10**5000}, "prefix_folder_days: <int> is out of"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_size": "9" * 400}, "prefix_folder_size: '999"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_size": "much"}, "prefix_folder_size: 'much' isn't a size"),
        ({"prefix_folder": tmp_path / "a", "prefix_folder_days": "week"}, "prefix_folder_days: 'week'"),
        ({"prefix_cache": 1}, "prefix_cache: 1"),
        ({"prefix_folder": tmp_path / "a", "prefix_cache": False}, "prefix_folder: target 'cpu' keeps no prefixes"),
    ):
        with pytest.raises(RequestError, match=message):
            opened(tiny_bundle, **options)


def test_a_target_that_can_t_share_blocks_says_so(make_llm: Any, toy: Any, tmp_path: Path) -> None:
    llm = make_llm(toy())
    assert llm.info()["prefix_cache"] is None
    with pytest.raises(RequestError, match="target 'toy' keeps no prefixes"):
        llm.save_prefix([1, 2, 3], tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_a_tenant_that_is_not_text_is_refused(tiny_bundle: Path, tmp_path: Path) -> None:
    """Records on the disk have hashes of it: it may not come so far."""
    with opened(tiny_bundle, prefix_folder=tmp_path / "kept") as llm:
        for call in (
            lambda: llm.generate([[5, 6, 7]], tenant="\ud800"),
            lambda: llm.save_prefix([5, 6, 7], tmp_path / "saved", tenant="\ud800"),
            lambda: llm.delete_prefixes(tenant="\ud800"),
        ):
            with pytest.raises(RequestError, match=r"^tenant: '\\ud800' isn't a name"):
                call()
        with pytest.raises(RequestError, match=r"^tenant: 3 is of type int"):
            llm.delete_prefixes(tenant=3)  # type: ignore[arg-type]
        assert llm.generate([[5, 6, 7]], SamplingParams(max_tokens=2))[0].token_ids


def test_the_engine_goes_on_when_a_call_between_steps_fails(make_llm: Any, toy: Any) -> None:
    llm = make_llm(toy())
    with pytest.raises(ZeroDivisionError):
        llm._loop.call(lambda: 1 // 0)
    assert llm._loop.call(lambda: 7) == 7
    assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids) == 3


def toy_engine(toy: Any, blocks: int = 12) -> Engine:
    """Blocks of 16 tokens, found again by requests of the same tenant."""
    executor = toy(blocks, 16, caps=ExecutorCaps(shared_blocks=True))
    return Engine(executor, SchedulerConfig(prefix_cache=True))


def finish(engine: Engine, *requests: Generation) -> list[list[int]]:
    for request in requests:
        engine.add_request(request)
    while engine.has_work():
        engine.step()
    return [request.tokens[request.prompt_length :] for request in requests]


def ask(prompt: list[int], new: int = 1, tenant: str = "", **fields: Any) -> Generation:
    return Generation(prompt, SamplingParams(max_tokens=new, **fields), options=RequestOptions(tenant))


def saved(toy: Any, prompt: list[int], folder: Path, tenant: str = "") -> None:
    """A folder with the whole blocks of a prompt."""
    engine = toy_engine(toy)
    finish(engine, ask(prompt, tenant=tenant))
    cache = engine.scheduler.cache
    with opened_tier(engine.executor, cache, folder) as disk:
        assert save_prefix(cache, ask(prompt, tenant=tenant), disk) == len(prompt) // 16 * 16


def test_what_is_evicted_never_comes_into_the_folder_of_one_prefix(toy: Any, tmp_path: Path) -> None:
    """It may be another tenant's: the folder is read alone. The engine's own tier gets it."""
    prompt, folder = [7] * 100, tmp_path / "saved"
    saved(toy, prompt, folder, "me")
    files = sorted(folder.glob("*.kv"))
    for of_engine in (False, True):
        engine = toy_engine(toy)
        cache = engine.scheduler.cache
        if of_engine:
            cache.tier = open_tier(engine.executor, cache, tmp_path / "engine")
        finish(engine, ask([*range(180)], tenant="other"))
        before = engine.pools["g0"].evictions
        with opened_tier(engine.executor, cache, folder) as disk:
            assert load_prefix(cache, ask(prompt, tenant="me"), disk) == 96
            assert engine.pools["g0"].evictions > before
            disk.flush()
        assert sorted(folder.glob("*.kv")) == files and len(files) == 6
        if cache.tier is not None:
            cache.tier.flush()
            assert [*(tmp_path / "engine").glob("*.kv")]
            cache.tier.close()
        assert engine.pools["g0"].free_blocks == 12


def test_a_prefix_is_read_while_a_copy_is_pending(toy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beam search whose root takes another sequence's place: that one's last block is free, and still to be copied
    by the next step. What is read from the folder between the two lies elsewhere."""
    choose = BeamSearch.choose

    def one_that_is_not_the_root(search: BeamSearch) -> list[Branch]:
        going = choose(search)
        others = [branch for branch in going if branch.parent is not search.root]
        return others[:1] if search.root.output_length in (3, 6) and others else going

    monkeypatch.setattr(BeamSearch, "choose", one_that_is_not_the_root)

    def searched(engine: Engine, load: Path | None) -> list[int]:
        request = ask([1, 2, 3, 4, 5], 12, num_beams=2)
        BeamSearch.begin(request, 260)
        engine.add_request(request)
        cache, pending = engine.scheduler.cache, 0
        while engine.has_work():
            engine.step()
            pending += bool(cache.copies.get("g0"))
            if load is not None:
                with opened_tier(engine.executor, cache, load) as disk:
                    load_prefix(cache, ask([9] * 130, tenant="t"), disk)
                    cache.forget("t")
        assert pending > 2 and engine.pools["g0"].free_blocks == 12
        return request.tokens

    saved(toy, [9] * 130, tmp_path / "saved", "t")
    assert searched(toy_engine(toy), tmp_path / "saved") == searched(toy_engine(toy), None)
