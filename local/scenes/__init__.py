"""Scenarios on the embedded cloud: one job (or two) each, one thing that goes wrong, and what is checked."""
