"""Passes that make fewer and larger ops."""
