"""GGUF files: their header, keys and blocks, what their architectures mean to transformers, and their tokenizers."""
