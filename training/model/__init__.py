"""What computes a step, and the models that are loaded."""
