"""Serves a bundle: ``LLM``, the engine with its thread, and the functions that turn a caller's arguments into
requests.
"""
