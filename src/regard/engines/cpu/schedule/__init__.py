"""From a problem to calls of kernels: tiles and lists, plans, and the order of their work."""
