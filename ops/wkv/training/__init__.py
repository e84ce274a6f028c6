"""RWKV's weighted average of past values without pools, which a backward goes through."""
