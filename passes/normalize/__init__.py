"""Replaces the different spellings of each op by one ``ew`` op, and brings values to the form [T, ...]."""
