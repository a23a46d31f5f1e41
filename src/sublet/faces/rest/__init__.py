"""Our own HTTP interface, /api/v1: what the command line speaks."""
