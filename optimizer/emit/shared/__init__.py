"""What emitters share: their interface, the bundle's writer, attention kernels compiled ahead, and their report."""
