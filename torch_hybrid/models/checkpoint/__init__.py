"""Checkpoints of safetensors, of which is read what is kept.

``files`` has the tensors of a folder, by headers and index; ``content`` what a weight is made of,
slices of stored tensors that are joined; ``unread`` such a weight as a tensor, which torch's own
operations cut and join; ``pieces`` the bytes of slices, and how they get to their place; ``read``
all weights of a model, by several threads; ``together`` ranks that load, and fail, together.
"""
