"""What is asked and answered: bodies of requests and answers, errors, and the OpenAPI document."""
