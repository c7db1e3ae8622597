"""Load tests: programs that drive a real server over HTTP, each by its make target; pytest collects none of them."""
