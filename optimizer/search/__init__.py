"""Searches under a budget: formats, key/value heads, and parts of the model to remove. See ``compose``."""
