"""How a program talks to a Sublet server. Standard library only: it must work inside any training image."""
