"""What runs one engine, in a process of its own."""
