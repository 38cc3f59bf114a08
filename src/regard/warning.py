"""The category of every warning that `regard` gives."""


class RegardWarning(UserWarning):
    """Warn that a call works, though less well than the caller may expect."""
