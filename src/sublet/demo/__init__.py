"""The demo: the whole idea on one machine, with real training, checked by itself."""
