"""Passes for recurrent layers: convolutions over the last tokens, selective scans and delta rules."""
