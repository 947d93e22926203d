"""The systems that ours is compared with, each in a virtual environment of its own."""
