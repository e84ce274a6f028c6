"""Checkpoints of safetensors, of which only those bytes are read that a model keeps.

    files       the tensors of a folder, by headers and index
    content     a weight's composition: slices of stored tensors that are joined
    unread      such a weight as a tensor, which torch's own operations cut and join
    pieces      the bytes of slices, and how they get to their place
    read        all weights of a model, read by several threads
    together    ranks that load, and fail, together

``update`` writes new values into weights that were read so.
"""
