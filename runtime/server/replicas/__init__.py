"""Replicas of a model on Ray Serve."""
