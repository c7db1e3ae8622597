"""The HTTP/1.1 connection: parsing, limits, time, listening. Knows nothing of routes."""
