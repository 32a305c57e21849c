"""The gateway: everything that touches a request's bytes on their way to an engine."""
