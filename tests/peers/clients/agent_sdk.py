"""An agent on OpenAI's Agents SDK, on the Responses API (its default) or chat completions."""

import asyncio
import json
import os
import sys

from agents import (
    Agent,
    AsyncOpenAI,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)

set_tracing_disabled(True)


@function_tool
def search(query: str) -> str:
    """Search."""
    assert query == "a"
    return "( a ) b c"


async def main():
    model = (OpenAIResponsesModel if sys.argv[1] == "responses" else OpenAIChatCompletionsModel)(
        "policy", AsyncOpenAI()
    )
    agent = Agent(name="searcher", instructions="answer", model=model, tools=[search])
    if sys.argv[2] == "stream":
        run = Runner.run_streamed(agent, os.environ["FORAY_QUESTION"])
        async for _ in run.stream_events():
            pass
    else:
        run = await Runner.run(agent, os.environ["FORAY_QUESTION"])
    print(json.dumps({"answer": run.final_output}))


asyncio.run(main())
