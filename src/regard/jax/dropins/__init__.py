"""`functional` has `jax.nn.dot_product_attention` with its conventions."""
