"""Load tests of a real server over HTTP, each run by its make target, and their tests."""
