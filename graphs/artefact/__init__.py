"""Artefact: a file of compiled steps, the facts that it holds for, and its use by a runner."""
