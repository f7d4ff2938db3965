"""Searches under a budget: formats, key/value heads, and what goes of a model. See ``compose``."""
