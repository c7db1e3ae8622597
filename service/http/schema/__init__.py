"""The fields of requests and answers."""
