"""Compiling, capturing and running whole steps."""
