"""Compiled steps in a file: what they hold for, what is in it, and how a runner uses it."""
