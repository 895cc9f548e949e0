"""Callbacks that make the trainers of other frameworks keep the job contract. Each file needs its framework only."""
