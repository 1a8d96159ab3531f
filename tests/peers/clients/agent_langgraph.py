"""An agent of LangGraph and langchain-openai, plain or streamed."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def search(query: str) -> str:
    """Search."""
    assert query == "a"
    return "( a ) b c"


def play(question, base_url, api_key, mode):
    """Return the agent's answer."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key, streaming=mode == "stream")
    agent = create_agent(model, tools=[search])
    return agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"][-1].content


if __name__ == "__main__":
    given = (os.environ[name] for name in ("FORAY_QUESTION", "OPENAI_BASE_URL", "OPENAI_API_KEY"))
    print(json.dumps({"answer": play(*given, *sys.argv[1:])}))
