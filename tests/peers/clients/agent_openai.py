"""An agent on the openai client: chat completions, plain or streamed, or the Responses API."""

import json
import os
import sys

from openai import OpenAI

client = OpenAI()
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
TOOL = {"type": "function", "function": {"name": "search", "description": "Search.", "parameters": PARAMETERS}}
QUESTION = os.environ["FORAY_QUESTION"]


def search(query):
    assert query == "a"
    return "( a ) b c"


def chat(stream):
    messages = [{"role": "user", "content": QUESTION}]
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


def respond(stream):
    items = [{"role": "user", "content": QUESTION}]
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


api, stream = sys.argv[1], sys.argv[2] == "stream"
print(json.dumps({"answer": (chat if api == "chat" else respond)(stream)}))
