"""What the maths refuses."""


class InvalidLogitsError(ValueError):
    """A row that is needed holds no distribution: it has a NaN or +inf, or no finite entry at all."""


class NothingAllowedError(ValueError):
    """A request's settings, its grammar among them, exclude every token of a row."""


def invalid_logits(position: int) -> str:
    """The error's text for the target's row of that position."""
    return f"the target's logits for position {position} have a NaN or +inf, or no finite entry"


def nothing_allowed(position: int) -> str:
    """The error's text for a row in which nothing is left."""
    return f"no token is allowed at position {position}: the sampling settings exclude each other"
