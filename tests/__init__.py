"""A package, so that no installed one of the same name comes first: a dependency of httplint brings one."""
