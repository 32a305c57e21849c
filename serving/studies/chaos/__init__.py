"""Faults injected into a running stack under load, and whose requests failed through them.

A schedule that a seed decides kills or halts parts of the stack one after another, while
clients of every kind go on asking; each request that fails is laid to a fault, or is a finding.
"""
