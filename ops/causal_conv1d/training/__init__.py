"""Convolution without a pool, which a backward goes through: the form to train with."""
