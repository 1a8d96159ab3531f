"""An agent of smolagents, which rewrites its history: calls become text, results messages of the user."""

import json
import os

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: what to search for
    """
    assert query == "a"
    return "( a ) b c"


model = OpenAIServerModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
agent = ToolCallingAgent(tools=[search], model=model, verbosity_level=0)
print()
print(json.dumps({"answer": str(agent.run(os.environ["FORAY_QUESTION"]))}))
