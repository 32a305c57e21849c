"""Does load-aware routing keep up with the better variant, whatever the load?

A ramp of concurrent streams, 1 up to many and back, on one running stack: everything to the
drafting variant, everything to the plain one, and as the router says.
"""
