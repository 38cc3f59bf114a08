"""Operations that Triton lacks: `functions` has floored integers, mathematics and random bits."""
