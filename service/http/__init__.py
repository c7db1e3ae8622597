"""The HTTP process: routes, requests and answers, and the client of the inference processes. No torch."""
