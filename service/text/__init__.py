"""What a request in text means: texts to sequences of ids, and their results to answers.

It does no input or output. Work that may be long is a generator: see work.py.
"""
