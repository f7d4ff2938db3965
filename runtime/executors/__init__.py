"""What runs a step: ``base`` says what that means, and there is one file a target."""
