"""What enters from outside, one file a kind: users' messages are read strictly, AWS events leniently.

Readers raise `Rejected` with a sentence that names the field, its value and the way out.
"""
