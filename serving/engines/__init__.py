"""Engines: what answers requests, each behind a lease on its own HTTP endpoint."""
