"""Functions that the families' FlashInfer implementations share; FlashInfer is imported when
called."""
