"""Models of transformers that train: packed, exact, compiled whole."""
