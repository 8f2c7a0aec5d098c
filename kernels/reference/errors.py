"""What the maths refuses."""


class InvalidLogitsError(ValueError):
    """A row that is needed holds no distribution: it has a NaN or +inf, or no finite entry at all."""
