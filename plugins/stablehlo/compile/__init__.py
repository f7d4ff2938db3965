"""The compiler of the stablehlo target: it writes StableHLO modules of fixed sizes, for XLA's compilers and IREE."""
