"""Rules as Triton functions: `lowering` has values, `bounds` bounds over tiles."""
