"""T5 (arXiv 1910.10683): configuration, layers, model and decoding session."""
