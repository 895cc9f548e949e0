"""The node agent: one process per node, between the supervisor (orders, reports, bucket) and the ranks (files).

Read agent.py first: it is the state machine. attempt.py is one attempt on this node, saves.py and commit.py are how
a checkpoint becomes durable, fetch.py how one comes back. boto3 is used in cloud.py only.
"""
