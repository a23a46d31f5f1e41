"""The decisions: no clock, no chance, no I/O, no log. `core.Core` is the only door."""
