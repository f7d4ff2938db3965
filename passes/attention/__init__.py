"""Passes that bring attention to the form that a target runs."""
