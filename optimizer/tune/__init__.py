"""What ``optimize tune`` does: choices of the cpu target that suit a machine, measured there."""
