"""Before anything is started: what fits a machine, how fast it decodes, and what to run.

Owns the arithmetic of memory and the model of decode speed; every speed is a
prediction and says so. Needs neither an engine nor Ray nor NumPy. Leaves measuring to
`studies` and refusing a configuration to `checks`.
"""
