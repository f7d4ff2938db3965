"""Removes what rewriting leaves: no-ops, constants, repeated and unused calls."""
