"""The format of bundles (``manifest``, ``weights``, ``tokenizer_files``), and the code that reads and checks them."""

MANIFEST_PATH = "manifest.json"
"""The file that makes a folder a bundle."""
