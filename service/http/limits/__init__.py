"""What a request may hold, and what a client may ask for."""
