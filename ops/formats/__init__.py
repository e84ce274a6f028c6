"""Formats of stored numbers: FP8 with block scales, INT8, INT4, and FP8 keys and values."""
