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


async def run(question, base_url, api_key, api, mode):
    kind = OpenAIResponsesModel if api == "responses" else OpenAIChatCompletionsModel
    model = kind("policy", AsyncOpenAI(base_url=base_url, api_key=api_key))
    agent = Agent(name="searcher", instructions="answer", model=model, tools=[search])
    if mode == "stream":
        result = Runner.run_streamed(agent, question)
        async for _ in result.stream_events():
            pass
        return result.final_output
    return (await Runner.run(agent, question)).final_output


def play(*given):
    """Return the agent's answer."""
    return asyncio.run(run(*given))


if __name__ == "__main__":
    given = (os.environ[name] for name in ("FORAY_QUESTION", "OPENAI_BASE_URL", "OPENAI_API_KEY"))
    print(json.dumps({"answer": play(*given, *sys.argv[1:])}))
