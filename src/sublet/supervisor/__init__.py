"""Runs beside the program in every instance: starts it, watches it, passes the notice on, tells how it ended.

Rule: everything that matters is a file in the instance's directory, so that any process here may be killed at any time.
"""
