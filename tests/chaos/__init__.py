"""Faults and hostile clients against real servers, with figures: `make chaos`."""
