"""Compilation of a traced step: layers copied, the graph cut into regions, each compiled once."""
