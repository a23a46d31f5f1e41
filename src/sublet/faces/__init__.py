"""The faces: thin ways in. Each turns what it is asked into commands and queries of the service, and nothing more."""
