"""Weights that lie in their files in another form than models compute in: one file a format."""
