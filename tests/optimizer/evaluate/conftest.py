"""Two tiny models of different sizes with a tokenizer, as folders and as bundles."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from enginewright.optimizer.evaluate.models import BundleModel, OpenOptions
from enginewright.optimizer.export import export

TEXT = (
    'The quick brown fox said: "Où est la clé?" Nobody knew, so it counted: 1, 2, 3, 5, 8, 13, 21. Der Schlüssel lag '
    "unter der Matte.\n\n\tdef key():\n\t\treturn None\n\nAnd that is why foxes, on the whole, prefer open windows.\n"
)


@dataclass(frozen=True)
class Pair:
    """A model as transformers saves it, and its bundle."""

    folder: Path
    bundle: Path

    def model(self) -> PreTrainedModel:
        """transformers' own reading of the folder."""
        loaded: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            self.folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        return loaded


def save_with_tokenizer(model: PreTrainedModel, tokenizer_of: Path, folder: Path) -> Path:
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_of / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def mistral(
    tiny_folder: Path, tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Pair:
    """Hidden 96, 2 layers with a window of 8, a vocabulary with more entries than the tokenizer has tokens."""
    model = tiny_model("Mistral", hidden_size=96, intermediate_size=160, vocab_size=301)
    place = tmp_path_factory.mktemp("mistral")
    folder = save_with_tokenizer(model, tiny_folder, place / "model")
    export(folder, place / "model.bundle")
    return Pair(folder, place / "model.bundle")


@pytest.fixture(params=["llama", "mistral"])
def pair(request: pytest.FixtureRequest, tiny_folder: Path, tiny_bundle: Path, mistral: Pair) -> Pair:
    """Each of the two sizes in turn."""
    return Pair(tiny_folder, tiny_bundle) if request.param == "llama" else mistral


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture
def bundle_model(tiny_bundle: Path) -> Iterator[BundleModel]:
    model = BundleModel(tiny_bundle, OpenOptions(threads=1, memory="16MiB"))
    yield model
    model.close()
