"""Linear attention with a scalar decay without pools, which a backward goes through."""
