"""The HTTP/1.1 connection: parsing, limits, time limits and listening. It knows nothing about routes."""
