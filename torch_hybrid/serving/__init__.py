"""Serving of requests: continuous batching over a runner."""
