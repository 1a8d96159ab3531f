"""A ReAct agent of LangGraph on langchain-openai."""

import json
import os
import sys

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def search(query: str) -> str:
    """Search."""
    assert query == "a"
    return "( a ) b c"


model = ChatOpenAI(model="policy", streaming=sys.argv[1] == "stream")
agent = create_agent(model, tools=[search])
last = agent.invoke({"messages": [{"role": "user", "content": os.environ["FORAY_QUESTION"]}]})["messages"][-1]
print(json.dumps({"answer": last.content}))
