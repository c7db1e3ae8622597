"""The artifact that training makes and the service serves: network, cache, sampler, tokenizer, checkpoint.

Imports nothing by itself, so that a process that needs only the tokenizer does not load torch.
"""
