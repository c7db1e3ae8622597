"""What training produces and the service serves: the model, its cache, sampling, tokenizer and checkpoint format.

Imports nothing, so that a process that needs only the tokenizer does not load torch.
"""
