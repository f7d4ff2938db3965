"""The executor: what is damaged, numbers that aren't finite, slots that grow and shrink, and what it says of itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from enginewright.plugins.stablehlo.serve.executor import (
    ModuleSlots,
    StableHloExecutor,
    XlaModules,
    stablehlo_section,
)
from enginewright.plugins.stablehlo.serve.pjrt_library import Pjrt
from enginewright.plugins.steps.slots import SlotRun
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.engine.llm import LLM
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.executors.target import Placement
from enginewright.runtime.requests.sampling import SamplingParams
from enginewright.runtime.shared.errors import BundleError, CapacityError, EnginewrightError, TargetError
from tests.plugins.graphs.linear_session import lowered_family
from tests.plugins.stablehlo.compile import module_session

pytest.importorskip("jaxlib", reason="jaxlib is not installed: pip install 'enginewright[stablehlo]'")

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PROMPT = [5, 9, 7]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return module_session.write_bundle(lowered_family("llama"), tmp_path_factory.mktemp("hlo") / "b").path


def executor(path: Path, slots: int = 2) -> StableHloExecutor:
    opened = make_executor(Bundle.open(path, trust="code"), "stablehlo", {"full": slots}, 20, Placement(threads=1))
    assert isinstance(opened, StableHloExecutor)
    return opened


def test_what_it_says_of_itself(path: Path) -> None:
    opened = executor(path, 3)
    assert not opened.caps.ragged and opened.caps.max_requests == 3
    assert [group.block_size for group in opened.cache_groups] == [21]
    about = opened.describe()
    assert (about["target"], about["provider"], about["threads"], about["compiled"]) == ("stablehlo", "cpu", 1, 0)


def test_numbers_that_are_not_finite_go_with_their_request(path: Path) -> None:
    opened = executor(path, 1)
    with LLM.from_executor(opened, Bundle.open(path, trust="code").model) as llm:
        expected = list(llm.generate(PROMPT, GREEDY)[0].token_ids)
        for memory in opened._slots._memory.values():
            memory[:] = np.nan
        with pytest.raises(EnginewrightError, match="NaN or infinite"):
            llm.generate(PROMPT, GREEDY)
        assert list(llm.generate(PROMPT, GREEDY)[0].token_ids) == expected


def test_slots_grow_with_their_longest_request_and_shrink_again(path: Path) -> None:
    """The modules pretend to have slots of 16 and 32 places: those of 32 run, those of 16 are only planned for."""
    bundle = Bundle.open(path, trust="code")
    section = stablehlo_section(bundle, "stablehlo")
    short = tuple(m.model_copy(update={"places": 16}) for m in section.modules if m.tokens < 16)
    section = section.model_copy(update={"modules": (*short, *section.modules)})
    slots = ModuleSlots(bundle, "stablehlo", section, XlaModules(section, "cpu", 1), slots=2, load="read")
    assert slots.length == 16

    def fit(slot: int, tokens: int) -> None:
        slots.fit(np.asarray([slot], np.int32), np.asarray([tokens], np.int32))

    name = section.caches[0]
    fit(0, 15)
    slots._memory[name][0] = 1
    assert slots.length == 16
    fit(1, 16)
    assert slots.length == 32
    assert (slots._memory[name][0, :, :15] == 1).all() and not slots._memory[name][0, :, 15:].any()
    fit(1, 12)  # the other has 15 tokens still
    assert slots.length == 32
    fit(0, 7)
    fit(1, 7)
    assert slots.length == 16 and (slots._memory[name][0, :, :7] == 1).all()
    with pytest.raises(CapacityError, match="a request has 32 tokens, and slots were made for 31"):
        fit(0, 32)


@pytest.mark.matrix
def test_what_is_copied_by_a_client_that_does_not_write_in_place(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin may have memory that isn't the host's."""
    first, second = (executor(path) for _ in range(2))
    view = Pjrt.view
    monkeypatch.setattr(second._client, "view", lambda array, donated=False: view(second._client, array))
    run = SlotRun(0, np.asarray([PROMPT]), np.arange(3)[None], np.asarray([2]), np.asarray([0]))
    logits = [one._slots.run(run).copy() for one in (first, second)]
    step = SlotRun(0, np.asarray([[4]]), np.asarray([[3]]), np.asarray([0]), np.asarray([0]))
    logits += [one._slots.run(step).copy() for one in (first, second)]
    np.testing.assert_array_equal(logits[0], logits[1])
    np.testing.assert_array_equal(logits[2], logits[3])
    assert first.describe()["caches"] == "in place" and second.describe()["caches"] == "copied"


def test_what_is_damaged_or_missing(path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(path, folder)
    for file in (folder / "targets/stablehlo/modules").iterdir():
        file.write_bytes(bytes(len(file.read_bytes())))
    with (
        LLM(folder, threads=1, context=20, trust="code") as llm,
        pytest.raises(BundleError, match=r"decode-1x32|prompt-4x32"),
    ):
        llm.generate(PROMPT, GREEDY)
    with pytest.raises(BundleError, match="SHA-256 is not the one"):
        Bundle.open(folder, trust="code").verify_hashes()
    next((folder / "targets/stablehlo/modules").iterdir()).unlink()
    with pytest.raises(BundleError, match=r"modules/.*: No such file"):
        Bundle.open(folder, trust="code")
    with pytest.raises(TargetError, match="there is no PJRT plugin 'rocket' installed"):
        LLM(path, provider="rocket", trust="code")
    with pytest.raises(CapacityError, match="context: 40 tokens are more than the 31"):
        LLM(path, context=40, trust="code")
