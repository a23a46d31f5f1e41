"""The words of Sublet: frozen values that every other package speaks. Standard library only; nothing here decides."""
