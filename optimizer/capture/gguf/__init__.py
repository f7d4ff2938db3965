"""Reads GGUF files: header, keys and blocks, architectures with their classes in transformers, and tokenizers."""
