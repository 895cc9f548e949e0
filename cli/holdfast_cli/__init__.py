"""The command line `holdfast`: reads the jobs table, acts through the queues; no server behind it."""
