"""Serves language models larger than memory: streamed weights, exact speculation, batching."""
