"""A taskset of verifiers as an agent: it asks, offers its tools and scores; Foray's policy plays.

    pip install verifiers uv            # in a separate environment, with your taskset; here: /opt/vf

    rollout:
      agent:
        type: command
        command: [/opt/vf/bin/python, examples/agents/verifiers_agent.py, my-taskset]
        reward: agent                   # the taskset's
        memory_mb: 8192

The id of a question (`learner.questions`) is the position of the task in the taskset. Further arguments go to vf-eval,
e.g. `--env.agent.harness.id bash`.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

taskset, *arguments = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    command = [
        *(str(Path(sys.executable).with_name("vf-eval")), taskset, "--model", "policy"),
        *("--select.include.idx", os.environ["FORAY_QUESTION_ID"], "--output-dir", folder, "--no-push"),
        *("--env.agent.client.type", "eval", "--env.agent.client.base-url", os.environ["OPENAI_BASE_URL"]),
        *("--env.agent.client.api-key-var", "OPENAI_API_KEY", "--env.agent.runtime.type", "subprocess"),
        *arguments,
    ]
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    traces = list(Path(folder).rglob("traces.jsonl"))
    lines = traces[0].read_text().splitlines() if traces else []
    if done.returncode or len(lines) != 1:
        sys.exit(f"vf-eval exited with {done.returncode} and {len(lines)} traces\n{done.stdout}\n{done.stderr}")
    episode = json.loads(lines[0])
if not episode["ok"]:
    sys.exit(f"the episode failed: {episode['errors']} {[trace.get('errors') for trace in episode['traces']]}")
rewards = [reward for trace in episode["traces"] for reward in trace["rewards"].values()]
print(json.dumps({"reward": sum(reward["score"] * reward["weight"] for reward in rewards)}))
