"""Delta rules without pools, which a backward goes through: forms to train with."""
