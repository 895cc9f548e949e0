"""The ranks' program: a Llama-like decoder trained under DDP or FSDP2, that saves, stops and resumes exactly when told.

Read `train.py` first. The agent starts it as `python -m trainer <run_dir>`; plain torchrun works too. The files it
exchanges with the agent are in `job_contract/node_files.py`.
"""
