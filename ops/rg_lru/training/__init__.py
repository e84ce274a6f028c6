"""Real-gated linear recurrent units without pools, which a backward goes through."""
