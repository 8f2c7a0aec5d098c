"""What makes the tiny pair: text, training, figures and files. ``train_tiny_pair.py`` runs it."""
