"""Functions with the names and conventions of jax.nn."""
