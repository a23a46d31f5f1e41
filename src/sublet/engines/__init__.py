"""Engines start and stop instances on machines, real or pretended. They have no policy."""
