"""The example of skyrl-gym as an agent, in a process. Argument: the retriever."""

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.append(str(Path(__file__).parents[3] / "examples" / "agents"))
from skyrl_gym_agent import agent

task = json.loads(os.environ["FORAY_TASK"])
question = SimpleNamespace(text=task["question"], answers=task["answers"])
access = SimpleNamespace(base_url=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
config = {"search_url": f"{sys.argv[1]}/retrieve", "topk": 2, "timeout": 30}
print(json.dumps(asyncio.run(agent(question, access, config=config))))
