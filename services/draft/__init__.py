"""Guesses the next tokens of every live sequence."""
