"""Experts that a backward goes through."""
