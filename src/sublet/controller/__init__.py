"""The turn: take, decide, commit, carry out, wait. Server and simulator run the same one."""
