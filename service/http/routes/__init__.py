"""One module per kind of route, what they share, and the writing of answers."""
