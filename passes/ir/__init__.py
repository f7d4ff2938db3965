"""The intermediate representation: Program (a graph and its inputs), WeightStore (lazy weights), and provenance."""
