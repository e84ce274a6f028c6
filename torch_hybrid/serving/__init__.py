"""Serving: requests in, tokens out; continuous batching over a runner."""
