"""The embedded cloud: the product's template, functions, state machine and nodes on this machine. The product never
imports it."""
