"""Before launch: what would go wrong, from files and settings alone.

Owns reading headers of checkpoints, the rules, and `moe-serving check`. Needs no GPU,
engine or Ray, and reads no tensor data. Leaves what only a running engine shows to
its probes, and memory arithmetic to `planner`. `run` has the functions that others call.
"""
