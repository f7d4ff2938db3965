"""The ``optimize`` command and the export pipeline: a model in, a bundle out."""
