"""Executors, which run steps: ``base`` has the protocol, and each target has an executor of its own."""
