"""What a request in text means: encoding, patterns, conditions."""
