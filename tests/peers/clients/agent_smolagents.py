"""An agent of smolagents, which rewrites its history: calls become text, results messages of the user."""

import json
import os
import sys

from smolagents import OpenAIServerModel, ToolCallingAgent, tool


@tool
def search(query: str) -> str:
    """Search.

    Args:
        query: what to search for
    """
    assert query == "a"
    return "( a ) b c"


def play(question, base_url, api_key):
    """Return the agent's answer."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key)
    return str(ToolCallingAgent(tools=[search], model=model, verbosity_level=0).run(question))


if __name__ == "__main__":
    given = (os.environ[name] for name in ("FORAY_QUESTION", "OPENAI_BASE_URL", "OPENAI_API_KEY"))
    print()
    print(json.dumps({"answer": play(*given, *sys.argv[1:])}))
