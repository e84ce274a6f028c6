"""Ops and whole steps on a GPU, beside what the hardware allows and the best public kernels."""
