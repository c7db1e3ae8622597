"""Patterns that a completion must match or stops at: regular expressions, and the automata that they become."""
