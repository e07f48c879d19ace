"""Which matrices a model has: what it stores, how that is cut, and what acts together."""
