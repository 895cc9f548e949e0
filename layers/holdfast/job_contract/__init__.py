"""The words that the supervisor and a training image share; standard library only, so that any image can carry it.

Every message has `"contract": 1`. Readers ignore fields they do not know and refuse versions they do not know.
Adding an optional field keeps the version. Golden samples: `events/contract/v1/`.
"""
