"""An agent on the openai client: chat completions, plain or streamed, or the Responses API."""

import json
import os
import sys

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}


def search(query):
    assert query == "a"
    return "( a ) b c"


def chat(client, question, stream):
    messages = [{"role": "user", "content": question}]
    while True:
        if stream:
            with client.chat.completions.stream(model="policy", messages=messages, tools=[TOOL]) as events:
                for _ in events:
                    pass
                message = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = search(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def respond(client, question, stream):
    items = [{"role": "user", "content": question}]
    tool = {"type": "function", "name": "search", "parameters": PARAMETERS, "strict": False}
    while True:
        if stream:
            with client.responses.stream(model="policy", input=items, tools=[tool]) as events:
                for _ in events:
                    pass
                response = events.get_final_response()
        else:
            response = client.responses.create(model="policy", input=items, tools=[tool])
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return response.output_text
        for call in calls:
            result = search(**json.loads(call.arguments))
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": result})


def play(question, base_url, api_key, api, mode):
    """Return the agent's answer."""
    client = OpenAI(base_url=base_url, api_key=api_key)
    return (chat if api == "chat" else respond)(client, question, mode == "stream")


if __name__ == "__main__":
    given = (os.environ[name] for name in ("FORAY_QUESTION", "OPENAI_BASE_URL", "OPENAI_API_KEY"))
    print(json.dumps({"answer": play(*given, *sys.argv[1:])}))
