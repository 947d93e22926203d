"""`python -m headrace.cli`: the command line where its script is not on the path."""

from headrace.cli.app import app

app()
