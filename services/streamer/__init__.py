"""Reads layers from storage into shared memory, ahead of the target."""
