"""Passes that bring experts to the form that a target runs."""
