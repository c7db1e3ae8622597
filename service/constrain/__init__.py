"""Constrained generation and stop patterns: regular expressions compiled to automata over character ids."""
