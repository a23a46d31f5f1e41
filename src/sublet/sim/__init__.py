"""Simulated time: scenarios, job streams and what is measured on them. Nothing in production imports this."""
