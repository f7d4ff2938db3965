"""``python -m enginewright``: the ``optimize`` command, where that isn't on PATH."""

from .optimizer.cli.app import main

if __name__ == "__main__":
    main()
