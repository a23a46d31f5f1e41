"""PAI's API on the port of ours: what client code that was written for PAI speaks."""
