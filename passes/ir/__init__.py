"""The intermediate representation: Program (graph and signature), WeightStore (lazy weights), provenance."""
