"""Checkpoints of safetensors, of which is read what is kept.

files.py      the tensors of a folder, by headers and index
content.py    what a weight is made of: slices of stored tensors, joined
unread.py     such a weight as a tensor, which torch's own operations cut and join
read.py       the bytes, from files to where a model keeps its weights
"""
