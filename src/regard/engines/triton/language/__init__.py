"""Operations that Triton lacks: floored integers, mathematics, random bits."""
