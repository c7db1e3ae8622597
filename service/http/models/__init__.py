"""The served models, and the patterns that were compiled for them."""
