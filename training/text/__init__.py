"""A text becomes ids and batches."""
