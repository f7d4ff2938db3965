"""The parts of a pass: context, pattern matching, the manager, the verifier, evaluation, and options."""
