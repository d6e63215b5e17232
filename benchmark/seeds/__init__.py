"""The benchmark documents that `lockstep-bench reproduce` runs again: their figures as data, sweeps, limits, tables."""
