"""What all parts of the compiler share: progress, memory, output files, hashes, what a bundle's bytes are for."""
