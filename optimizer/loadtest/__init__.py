"""Sends a server the requests of many clients, and measures what they get: ``optimize loadtest``."""
