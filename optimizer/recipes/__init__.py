"""Recipes: the settings of exports, as TOML."""
