"""The stablehlo target: modules of fixed sizes in StableHLO, for XLA's compilers (PJRT) and IREE."""
