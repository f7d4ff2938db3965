"""Decides which requests run in each step. It needs neither torch nor an executor."""
