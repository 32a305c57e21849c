"""Which variant answers a request. Plain Python: no Ray, no HTTP, no clock of its own."""
