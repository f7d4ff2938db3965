"""What goes of each layer so that a KL budget is met: measured layer by layer, chosen, and checked."""
