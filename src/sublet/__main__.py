"""`python -m sublet` is the command line."""

from sublet.cli import main

if __name__ == "__main__":
    main()
