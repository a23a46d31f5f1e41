"""Where the log and the present are kept; each module is one way to meet `ports.Store`."""
