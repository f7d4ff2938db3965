"""tests/golden/families.json has the outcome of exporting and running a tiny model of every family.

docs/use/families.md is made from it. ``pytest -m matrix tests/acceptance/test_families_table.py --update-golden``
writes both anew.
"""

from __future__ import annotations

import fcntl
import json
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from enginewright.optimizer.capture import CapturedModel, capture
from enginewright.optimizer.export import export
from enginewright.optimizer.recipes.recipe import load_recipe
from enginewright.optimizer.recipes.sections import BudgetSection
from enginewright.optimizer.recipes.targets import TARGETS
from enginewright.passes.recurrence.lower_recurrence import FORMS
from enginewright.runtime.shared.errors import UnsupportedModelError, VerificationError
from enginewright.runtime.shared.targets import OWN
from tests.families import RECORDS, RECURRENT, Family, read_families

from .test_families import compare, saved
from .tiny_configs import WHOLES, NoTinyModelError, tiny_family, tiny_whole

_ORIGINAL = "requests must fit the context that is fixed at the export (`--context`; default: the original context)"
_NO_IMAGES = "only text"

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    # Families of which another configuration fares otherwise than the first: its model type, and its fields.
    "phi3, LongRoPE": (
        "phi3",
        {
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "short_factor": [1.0 + 0.05 * i for i in range(8)],
                "long_factor": [2.0 + 0.5 * i for i in range(8)],
            },
        },
    ),
    "llama, dynamic NTK": (
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4},
        },
    ),
    "bert, as an encoder": ("bert", {"is_decoder": False}),
    "lfm2, without convolutions": ("lfm2", {"layer_types": ["full_attention"] * 2}),
}

LIMITS = {"phi3, LongRoPE": _ORIGINAL, "llama, dynamic NTK": _ORIGINAL, "fuyu": _NO_IMAGES, "emu3": _NO_IMAGES}
"""Notes on families that need something else."""

PARTS = {f"{family}, --part text": family for family in WHOLES}
"""Models that take images beside text, of which the text decoder is exported."""

FAMILIES = [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS, *PARTS]

# KL bounds that the page states, in nats per token: of tiny random models, for which 8 bits are coarser than for
# trained ones. The first that is half again what was measured is stated, so that other kernels keep to it too.
_BOUNDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)

HEADING = """# Families

```
optimize export MODEL
```

This page lists all families of decoders in transformers, by model type. `tests/acceptance/test_families_table.py` makes
the page. It exports and runs a tiny random model of each family. No part of Enginewright depends on a family's name, so
a model of another family works if all its parts are supported.

A model that also takes images or sounds (`...ForConditionalGeneration`) can't be exported as a whole.
`optimize export --part text` exports its [text decoder](models.md#models-that-take-images-or-sounds). The decoder has
another family name, such as gemma3_text for Gemma 3, mistral for Mistral 3 or llama for LLaVA.
"""
WORKS = """
## Families that work

In 32-bit floats, the logits of a prefill and 8 decode steps are within 1e-4 of transformers' logits. The lists are
ordered by the mean KL divergence of the `int8` bundle from the model, in nats per token. Models and tokens are random;
trained models have a lower KL.

"""
RECURRENT_LAYERS = """
## Recurrent layers

Only the targets {} run these families:

"""
REFUSED = """
## Families that are refused

`optimize export` ends with an error that names the module, and writes nothing.

"""
NOT_TRIED = """
## Families that were not tried

The test can't build tiny models of these families.

"""
REASONS = {
    r"of the number of tokens T|fixes the number of tokens": (
        "A layer assumes a fixed number of tokens in a step. Many state-space models and linear attentions do this"
    ),
    r"mixes the token axis|several rows of each token": "A convolution or a router mixes tokens outside of attention",
    r"attention is called with": (
        "Attention has an input that no kernel supports, such as indices of selected keys or a bias for positions"
    ),
    r"isn't a decoder-only": "The model isn't a decoder-only language model. `--part text` may export its text decoder",
    r"neither causal": "The attention mask is neither causal nor causal within a sliding window",
    r"differs from its source": "The captured program gives other results than its source",
    r"can't be traced": "The model can't be traced with a variable number of packed tokens",
    r"the cpu target has no": "The cpu target lacks an op of the model",
    r"attention interface": "The model mixes tokens without transformers' attention interface",
}
"""Regular expression of a message -> the reason that the page gives."""


def record_of(family: str, folder: Path, stated: float | None) -> Family:
    """The outcome for a family. ``stated`` is the KL bound that its record has now, which stays where it holds."""
    model_type, overrides = VARIANTS.get(family, (family, {}))
    part = "text" if family in PARTS else None
    try:
        model = tiny_whole(PARTS[family]) if part else tiny_family(model_type, **overrides)
    except NoTinyModelError as e:
        return Family("not tried", None, _plain(str(e)))
    source = saved(model, folder / "saved")
    try:
        compare(model, folder / "exact.bundle", (21, 3), 8, "best", source=source, part=part)
    except UnsupportedModelError as e:
        return Family("refused", None, _plain(e.message))
    except VerificationError as e:  # its figures are left out: they are another processor's as well
        return Family("refused", None, _plain(e.message.partition(":")[0]))
    recipe = load_recipe("int8").model_copy(update={"budget": BudgetSection(max_kl=_BOUNDS[-1])})
    (verification,) = export(source, folder / "int8.bundle", recipe=recipe, part=part).verification
    kl = verification.random_tokens.kl_mean
    bound = stated if stated is not None and kl <= stated else next(b for b in _BOUNDS if 1.5 * kl <= b)
    return Family("works", bound, LIMITS.get(family, ""))


def _block(names: Iterable[str]) -> str:
    """Families in a block of code; a variant is in parentheses."""
    text = ", ".join(
        f"{name} ({variant})" if variant else name for name, _, variant in (n.partition(", ") for n in names)
    )
    return "\n".join(["```text", *textwrap.wrap(text, 110, break_on_hyphens=False), "```", ""])


def page_of(records: Mapping[str, Family]) -> str:
    """docs/use/families.md."""
    works: dict[float, list[str]] = {}
    refused: dict[str, list[str]] = {reason: [] for reason in REASONS.values()}
    for name, one in records.items():
        if one.result == "works":
            assert one.kl is not None
            works.setdefault(one.kl, []).append(name)
        elif one.result == "refused":
            reason = next((text for message, text in REASONS.items() if re.search(message, one.note)), one.note)
            refused.setdefault(reason, []).append(name)
    parts = [HEADING, WORKS]
    for bound, names in sorted(works.items()):
        parts.append(f"KL at most {bound:g}:\n\n{_block(names)}\n")
    notes = {name: one.note for name, one in records.items() if one.result == "works" and one.note}
    parts += ["Limits:\n\n", *(f"- {name}: {note}\n" for name, note in notes.items())]
    targets = " and ".join(name for name in OWN if TARGETS[name].states)
    parts += [RECURRENT_LAYERS.format(targets), _block(sorted(RECURRENT))]
    parts += [REFUSED, "\n".join(f"{reason}:\n\n{_block(names)}" for reason, names in refused.items() if names)]
    parts += [NOT_TRIED, _block(name for name, one in records.items() if one.result == "not tried")]
    return "".join(parts)


def _capture_once(monkeypatch: pytest.MonkeyPatch) -> list[CapturedModel]:
    """Has both exports of a family begin with copies of one captured program, as capturing takes most of their time.

    Returns a list, to which the first export adds what it captures.
    """
    captures: list[CapturedModel] = []

    def once(source: Any, **given: Any) -> CapturedModel:
        if not captures:
            captures.append(capture(source, **given))
        return replace(captures[0], program=captures[0].program.copy())

    monkeypatch.setattr("enginewright.optimizer.export.stages.capture", once)
    return captures


def _plain(message: str) -> str:
    """A message on one line, without addresses and numbers of lines that a patch release moves."""
    first = " ".join(message.split())
    return re.sub(r"\.py:\d+ in ", ".py, ", first)[:300]


@pytest.fixture(scope="session")
def page(repository: Path) -> Path:
    return repository / "docs" / "use" / "families.md"


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_record(
    family: str, page: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = _capture_once(monkeypatch)
    torch.manual_seed(0)
    stated = read_families().get(family, Family("not tried", None, ""))
    record = record_of(family, tmp_path, stated.kl)
    if record.result == "works":
        assert (family in RECURRENT) == bool(captures[0].program.nodes_of(*FORMS)), "tests/families.py: RECURRENT"
    if request.config.getoption("--update-golden"):
        _update(page, family, record)
    else:
        assert stated == record, f"{RECORDS.name} is stale: run this file's tests with -m matrix --update-golden"


def test_the_page_is_what_the_records_say(page: Path, request: pytest.FixtureRequest) -> None:
    text = page_of(read_families())
    if request.config.getoption("--update-golden"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "make it anew: --update-golden"


def test_there_is_a_record_of_every_family_and_no_other() -> None:
    assert list(read_families()) == sorted(FAMILIES)


def test_as_many_families_work_as_are_promised() -> None:
    assert sum(one.result == "works" for one in read_families().values()) >= 110


def _update(page: Path, family: str, record: Family) -> None:
    with open(RECORDS, "r+", encoding="utf-8") as file:  # workers wait for one another
        fcntl.flock(file, fcntl.LOCK_EX)
        records = {name: one for name, one in read_families().items() if name in FAMILIES} | {family: record}
        records = dict(sorted(records.items()))
        file.truncate(0)
        json.dump({name: asdict(one) for name, one in records.items()}, file, indent=1, ensure_ascii=False)
        file.write("\n")
        page.write_text(page_of(records), encoding="utf-8")
