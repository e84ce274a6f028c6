"""Reports on a model and its runner: tables of facts, and timelines of steps."""
