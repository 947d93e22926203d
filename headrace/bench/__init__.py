"""Measures what is promised, beside what the disk and the peers do in the same run."""
