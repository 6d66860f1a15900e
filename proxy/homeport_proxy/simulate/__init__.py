"""A simulated cluster in virtual time, driven by the production router: what `homeport replay` and the benches run."""
