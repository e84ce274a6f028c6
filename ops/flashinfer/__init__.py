"""What the families' FlashInfer implementations share; importing it does not import FlashInfer."""
