"""Who asks, what they may, and what they used: keys, limits and the ledger of an internal API.

Leaves bytes to the gateway, which calls these rooms, and engines and variants to the router.
"""
