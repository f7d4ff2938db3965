"""Fixtures of the runtime's tests, with which targets are tested."""

from tests.optimizer.plan.conftest import tiny_program, tiny_steps
from tests.runtime.conftest import (
    make_bundle,
    make_llm,
    manifest,
    model_info,
    saying_fixture,
    tokenizer,
    tokenizer_files,
    toy,
)
from tests.runtime.executors.conftest import cache_home

__all__ = [
    "cache_home",
    "make_bundle",
    "make_llm",
    "manifest",
    "model_info",
    "saying_fixture",
    "tiny_program",
    "tiny_steps",
    "tokenizer",
    "tokenizer_files",
    "toy",
]
