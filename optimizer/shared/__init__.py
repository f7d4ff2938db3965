"""Code that all parts of the compiler share: progress, memory, output files, hashes, the bundle's bytes by purpose."""
