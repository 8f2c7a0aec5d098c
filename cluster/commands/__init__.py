"""The commands of ``outrider`` that are more than a few lines, and what commands share."""
