"""What a pass is made of: context, pattern matching, the manager, the verifier, evaluation, and what options say."""
