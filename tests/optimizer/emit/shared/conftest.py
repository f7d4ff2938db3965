"""The bundles that tests of the runtime write, for those of the writer."""

from tests.runtime.conftest import make_bundle, manifest, model_info, tokenizer_files

__all__ = ["make_bundle", "manifest", "model_info", "tokenizer_files"]
