"""The inference process: the loop that LitServe turns, continuous batching, and who runs when."""
