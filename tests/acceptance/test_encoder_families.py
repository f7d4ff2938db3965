"""tests/golden/encoders.json has the outcome of exporting and running a tiny model of every family of encoders.

docs/use/encoders.md is made from it. ``pytest -m matrix tests/acceptance/test_encoder_families.py --update-golden``
writes both anew.
"""

from __future__ import annotations

import fcntl
import json
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from enginewright.optimizer.export import export
from enginewright.optimizer.measure.text_results import run_texts
from enginewright.runtime.bundle.reader import Bundle
from enginewright.runtime.executors.open import make_executor
from enginewright.runtime.shared.errors import UnsupportedModelError, VerificationError

from .test_families import saved
from .tiny_configs import NoTinyModelError, tiny_encoder

RECORDS = Path(__file__).resolve().parents[1] / "golden" / "encoders.json"
FAMILIES = sorted(MODEL_FOR_MASKED_LM_MAPPING_NAMES)
LENGTHS = (7, 33, 1, 20)

# Both sides are f32 with sums in another order; a wrong mask, position or type moves a vector by 1e-2 and more.
TOLERANCE = 1e-5

HEADING = """# Encoders

```
optimize export MODEL
```

This page lists which of transformers' families of encoders can be exported.
`tests/acceptance/test_encoder_families.py` makes the lists from tiny random models.
[Embeddings](embeddings.md) shows how to use these bundles.

## Results by folder

| the model's folder | results of the bundle |
| --- | --- |
| has sentence-transformers' `modules.json` | pooled vectors, or scores of pairs if the file lists `LogitScore` |
| lists `...ForSequenceClassification` in config.json | classes; if there is only one label, scores of pairs |
| lists `...ForTokenClassification` in config.json | classes of tokens |
| lists an encoder's `...Model` or `...ForMaskedLM` in config.json | vectors: the mean over the tokens |

The last case is a guess, so the export warns. A decoder becomes an embedding model only if its folder has
`modules.json`, as Qwen3-Embedding and EmbeddingGemma have. The export refuses T5 encoders, CLIP, ColBERT, sparse
vectors, poolings that leave out prompts (`include_prompt: false`), and targets other than cpu. It also refuses recipes
with tables `auto`, `prune`, `attention`, `adaptive_context` or `buckets`. For vectors, a recipe's `max_kl` limits the
cosine distance. Without a calibration file, the export calibrates on the built-in text.

## What a recipe states

Two facts aren't in every model's files: the sizes to which vectors may be cut, and the text around a query and a
document. The keys `matryoshka_dimensions` of config.json and `truncate_dim` of config_sentence_transformers.json state
the sizes. If a decoder's `modality_config` has the key `message` (Qwen3-Reranker, zerank-2), the chat template
adds the text around messages with the roles `query` and `document`. The files of nomic-embed, mxbai-embed,
EmbeddingGemma, Qwen3-Embedding and bge-reranker-v2-gemma have none of these keys. For such models, a recipe must state
the facts:

```toml
[pooling]
dimensions = [512, 256, 128]       # sizes to which vectors may be cut
answers = ["yes", "no"]            # for a decoder: a reranker's score is the logit of "yes" minus that of "no"
template = "<|im_start|>user\\nQuery: {query}\\nDocument: {document}<|im_end|>\\n<|im_start|>assistant\\n"
```

## GGUF files

The key `pooling_type` of the [architecture](models.md#gguf-files-that-are-read) selects the pooling: 1 is the mean,
2 the first token, 3 the last token, and 4 a reranker's or classifier's head (`cls.*`). The value 0, a vector for each
token, is refused. If the key is missing, an encoder with a head is a reranker, and a decoder is a chat model. Any other
encoder returns the mean, and the export warns.

As in llama.cpp, `attention.causal` and `context_length` apply, vectors are normalized, and token types are 0.
Vectors differ from those of transformers and llama.cpp by at most 1e-5 (5e-4 if llama.cpp computes GELU in float16). A
recipe's `[pooling]` may state `dimensions` and `template`. Recurrent models with a pooling are refused.
"""
WORKS = """
## Families that work

In 32-bit floats, the vectors are within 1e-5 of transformers' vectors.

"""
REFUSED = """
## Families that are refused

"""
REASONS = {
    r"encoder with a decoder": "has an encoder and a decoder",
    r"isn't a decoder-only": "reads text and images",
    r"keep tokens apart|the token axis|attention interface": "mixes tokens outside of attention",
    r"scores of more than one product": "adds products of positions to attention's scores",
    r"attention is called with": "needs a special attention mask",
    r"can't run on a text alone": "needs other inputs than a text",
    r"of the number of tokens T|fixes the number of tokens": "works only with a fixed number of tokens",
    r"the cpu target has no": "needs an op that the cpu target lacks",
}
"""Regular expression of a message -> the reason that the page gives."""


def expected_vectors(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> np.ndarray:
    """The mean of the hidden states of each text, alone and without padding."""
    with torch.no_grad():
        rows = [model(input_ids=torch.tensor([list(text)])).last_hidden_state[0].mean(0) for text in texts]
    return torch.stack(rows).numpy()


def compare(model: PreTrainedModel, folder: Path) -> None:
    """Exports a saved model, and compares texts of one step with transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mean is assumed
        export(saved(model, folder / "saved"), folder / "tiny.bundle")
    random = np.random.default_rng(1)
    texts = [random.integers(3, 250, length).tolist() for length in LENGTHS]
    bundle = Bundle.open(folder / "tiny.bundle")
    executor = make_executor(bundle, "cpu", {}, bundle.model.context_length)
    try:
        vectors = np.concatenate(run_texts(executor, texts))
    finally:
        executor.close()
    np.testing.assert_allclose(vectors, expected_vectors(model, texts), atol=TOLERANCE, rtol=0)


def record_of(family: str, folder: Path) -> dict[str, str]:
    """The outcome for a family, and the message of a refusal."""
    try:
        model = tiny_encoder(family)
    except NoTinyModelError as e:
        return {"result": "not tried", "note": _plain(str(e))}
    try:
        compare(model, folder)
    except (UnsupportedModelError, VerificationError) as e:
        return {"result": "refused", "note": _plain(e.message)}
    return {"result": "works", "note": ""}


def _plain(message: str) -> str:
    """A message on one line, without numbers of lines that a patch release moves."""
    return re.sub(r"\.py:\d+ in ", ".py, ", " ".join(message.split()))[:300]


def read_records() -> dict[str, dict[str, str]]:
    """The records, sorted by family."""
    records: dict[str, dict[str, str]] = json.loads(RECORDS.read_text(encoding="utf-8"))
    return records


def page_of(records: Mapping[str, Mapping[str, str]]) -> str:
    """docs/use/encoders.md."""
    works = [name for name, one in records.items() if one["result"] == "works"]
    block = "\n".join(["```text", *textwrap.wrap(", ".join(works), 110, break_on_hyphens=False), "```", ""])
    refused: dict[str, list[str]] = {}
    for name, one in records.items():
        if one["result"] != "works":
            note = next((text for message, text in REASONS.items() if re.search(message, one["note"])), one["note"])
            refused.setdefault("not tried" if one["result"] == "not tried" else note, []).append(name)
    rows = "".join(f"| {', '.join(names)} | {reason.replace('|', ' ')} |\n" for reason, names in refused.items())
    return "".join([HEADING, WORKS, block, REFUSED, "| families | reason |\n| --- | --- |\n", rows])


@pytest.fixture(scope="session")
def page(repository: Path) -> Path:
    return repository / "docs" / "use" / "encoders.md"


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_record(family: str, page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    torch.manual_seed(0)
    record = record_of(family, tmp_path)
    if request.config.getoption("--update-golden"):
        _update(page, family, record)
    assert read_records()[family] == record, f"{RECORDS.name} is stale: run with -m 'matrix or soak' --update-golden"


@pytest.mark.parametrize("family", ["bert", "xlm-roberta", "modernbert"])
def test_vectors_equal_transformers(family: str, tmp_path: Path) -> None:
    compare(tiny_encoder(family), tmp_path)


def test_the_page_is_what_the_records_say(page: Path, request: pytest.FixtureRequest) -> None:
    text = page_of(read_records())
    if request.config.getoption("--update-golden"):
        page.write_text(text, encoding="utf-8")
    assert page.read_text(encoding="utf-8") == text, "make it anew: --update-golden"


def test_there_is_a_record_of_every_family_and_no_other() -> None:
    assert list(read_records()) == FAMILIES


def test_as_many_families_work_as_are_promised() -> None:
    assert sum(one["result"] == "works" for one in read_records().values()) >= 25


def _update(page: Path, family: str, record: dict[str, str]) -> None:
    with open(RECORDS, "a+", encoding="utf-8") as file:  # workers wait for one another
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        records = {name: one for name, one in json.loads(text or "{}").items() if name in FAMILIES} | {family: record}
        file.truncate(0)
        json.dump(dict(sorted(records.items())), file, indent=1, ensure_ascii=False)
        file.write("\n")
    page.write_text(page_of(dict(sorted(records.items()))), encoding="utf-8")
