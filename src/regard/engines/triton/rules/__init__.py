"""Rules as Triton functions: `lowering` has their values, `bounds` their bounds over tiles."""
