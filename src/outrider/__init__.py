"""Outrider: a distributed server for large language models that decodes speculatively across machines."""

__version__ = "0.1.0"
