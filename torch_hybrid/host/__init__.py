"""The host process: its memory, its defaults, and its output for users."""
