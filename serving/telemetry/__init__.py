"""Metrics: every name in one place, and what exports them."""
