"""What the gateway can carry, and what each of its layers costs, before a mock engine.

`mock` is the engine and `wire` what it is asked and answers. `relay`, `app` and `deployed` are
the gateway's layers as programs of their own, `peers` the two others that are compared.
`targets` starts and ends them all, `client` is the load, `measure` runs the interleaved rounds,
`report` condenses and prints them, `study` is the whole. Only `deployed` imports Ray.
"""
