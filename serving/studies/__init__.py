"""Studies: measuring a running server from outside, as its clients see it."""
