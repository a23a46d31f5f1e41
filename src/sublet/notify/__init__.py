"""Tells other systems what happened: webhooks, signed, retried, with a log of every delivery."""
