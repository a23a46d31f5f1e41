"""The command line. One rule: a command imports what it needs when it runs, so that `sublet ls` answers at once."""


def main() -> None:
    """The process's main function; ends it with the exit code."""
    from sublet.cli.front import run

    run()
