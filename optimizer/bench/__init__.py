"""What ``optimize bench`` does: speeds of a bundle on this machine, beside the machine's limits."""
