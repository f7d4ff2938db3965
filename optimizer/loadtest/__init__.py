"""``optimize loadtest``: sends a server the requests of many clients, and measures the answers."""
