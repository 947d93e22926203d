"""Where model directories come from: the demo pair, a local directory or the hub.

Knows nothing of how a model runs; that is `headrace.model`.
"""
