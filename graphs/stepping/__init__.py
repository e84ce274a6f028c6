"""A step from its plan to its logits: which graph serves it, and how it is run."""
