"""The bundle: its format (``manifest``, ``weights``, ``tokenizer_files``), how it is written and how it is read."""

MANIFEST_PATH = "manifest.json"
"""The file that makes a folder a bundle."""
