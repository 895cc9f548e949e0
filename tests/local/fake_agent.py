"""A node for tests: has a child as an agent has ranks and writes down what it was told."""

import json
import os
import signal
import subprocess
import sys
import time

if os.environ.get("NODE_TASK") == "ignore-sigterm":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
# A rank of its own session, which no signal to the agent's group reaches.
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)
print("agent of", os.environ["HOLDFAST_NODE"], flush=True)
facts = {"imds": os.environ["AWS_EC2_METADATA_SERVICE_ENDPOINT"], "stack": os.environ["HOLDFAST_STACK"]}
with open(os.path.join(os.environ["HOLDFAST_NODE_ROOT"], "facts.json.part"), "w") as file:
    json.dump(facts, file)
os.replace(file.name, file.name.removesuffix(".part"))
if os.path.exists(os.path.join(os.environ["HOLDFAST_NODE_ROOT"], "..", "leave")):
    sys.exit(0)
time.sleep(600)
