"""openai's client against `foray serve`: URL, token, name, question -> JSON of what each call brought."""

import json
import sys

import openai

url, token, name, question = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
messages = [{"role": "user", "content": question}]
tool = {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}}
tools = [{"type": "function", "function": tool}]


def streamed(**options):
    """What the chunks of a stream come to."""
    asked = client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **options)
    chunks = list(asked)
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    facts = [chunk.foray for chunk in chunks if getattr(chunk, "foray", None)]
    return {
        "content": "".join(delta.content or "" for delta in deltas),
        "thoughts": "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas),
        "finish": [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1],
        "searches": [search["query"] for fact in facts[:-1] for search in fact["searches"]],
        "foray": facts[-1],
        "usage": chunks[-1].usage.total_tokens,
    }


def refused(kind, key=token, **options):
    try:
        openai.OpenAI(base_url=url, api_key=key, max_retries=0).chat.completions.create(messages=messages, **options)
    except kind as error:
        return error.body["code"]
    return None


whole = client.chat.completions.create(model=name, messages=messages, temperature=0)
closed = client.chat.completions.create(
    model=name, messages=messages, temperature=0, extra_body={"foray": {"search": False}}
)
first = client.chat.completions.create(model=f"{name}-bare", messages=messages, tools=tools, temperature=0)
message = first.choices[0].message
history = [*messages, message]
history += [{"role": "tool", "tool_call_id": call.id, "content": "nothing"} for call in message.tool_calls or ()]
second = client.chat.completions.create(model=f"{name}-bare", messages=history, tools=tools, temperature=0)
print(
    json.dumps(
        {
            "version": openai.__version__,
            "models": [model.id for model in client.models.list()],
            "message": whole.choices[0].message.model_dump(exclude_none=True),
            "foray": whole.foray,
            "usage": whole.usage.total_tokens,
            "streamed": streamed(model=name, messages=messages, temperature=0),
            "closed": closed.foray,
            "calls": [json.loads(call.function.arguments) for call in message.tool_calls or ()],
            "second": second.usage.prompt_tokens - first.usage.prompt_tokens,
            "refused": [
                refused(openai.AuthenticationError, key="sk-wrong", model=name),
                refused(openai.NotFoundError, model="other"),
                refused(openai.BadRequestError, model=name, n=2),
            ],
        }
    )
)
