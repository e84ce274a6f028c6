"""C++ kernels: the builder, and headers shared by the families' translation units."""

from torch_hybrid.ops.native.build import BuildError, compiler_missing, load_library

__all__ = ["BuildError", "compiler_missing", "load_library"]
