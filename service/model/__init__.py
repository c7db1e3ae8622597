"""The model, its cache, sampling, tokenizer and checkpoint format, which training and the service share.

This file imports nothing, so a process that needs only the tokenizer does not load torch.
"""
