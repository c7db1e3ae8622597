"""The settings that the user left open, fitted to text, time and machine."""
