"""The API: bodies of requests and answers, errors, and the OpenAPI document."""
