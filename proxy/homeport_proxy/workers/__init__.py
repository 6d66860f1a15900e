"""Several worker processes that are one proxy to the outside: the parent knows, the workers serve."""
