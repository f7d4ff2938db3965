"""Workers: each runs one engine, in a process of its own."""
