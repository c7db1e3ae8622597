"""The HTTP/1.1 connection: what it may send, hold and begin; errors. It knows nothing about routes."""
