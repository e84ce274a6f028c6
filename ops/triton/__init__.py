"""Device functions, launch shapes and whole kernels that several op families share, in Triton."""
