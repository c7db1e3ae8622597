"""The inference process: the loop that LitServe calls, continuous batching and scheduling."""
