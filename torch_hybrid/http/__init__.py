"""OpenAI's HTTP API in front of an engine (``pip install torch-hybrid[serve]``)."""

from torch_hybrid.http.app import create_app

__all__ = ["create_app"]
