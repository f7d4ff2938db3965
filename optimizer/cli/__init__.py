"""The ``optimize`` command: parses arguments and prints; one file a command, no logic."""
