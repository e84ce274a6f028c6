"""The host process: its memory, its defaults, and what it tells whoever watches it."""
