"""Requests and their results: sampling parameters, state, outputs."""
