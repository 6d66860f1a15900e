"""One module per client API: what routing needs from it, its errors, where its usage stands."""
