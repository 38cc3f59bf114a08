"""One call on tensors, as data, and what runs it."""
