"""Products of matrices that lie by rows or by columns, to train with."""

from torch_hybrid.ops.matrix_product.op import matrix_product_forward

__all__ = ["matrix_product_forward"]
