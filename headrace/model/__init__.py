"""Runs Hugging Face models over ragged batches, weights borrowed layer by layer."""
