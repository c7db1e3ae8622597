"""What a model is worth: its losses beside those of baselines, and how much it copies."""
