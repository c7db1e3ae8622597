"""The writing of answers: their forms, JSON in parts, streams."""
