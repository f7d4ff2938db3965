"""The compiler of the stablehlo target: StableHLO modules of fixed sizes, for XLA's compilers (PJRT) and IREE."""
