"""The library where a framework owns the loop: one adapter a framework, imported only by those who have it."""
