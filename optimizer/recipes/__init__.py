"""Recipes: what an export does to a model, as TOML."""
