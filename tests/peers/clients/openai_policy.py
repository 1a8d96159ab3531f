"""openai's client against an engine: URL, prompt -> JSON of what each call brought."""

import json
import sys

import openai

url, prompt = sys.argv[1], sys.argv[2]
client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
model = client.models.list().data[0].id
greedy = {"model": model, "temperature": 0, "max_tokens": 12}
whole = client.completions.create(prompt=prompt, logprobs=2, echo=True, **greedy)
pieces = client.completions.create(prompt=prompt, stream=True, stream_options={"include_usage": True}, **greedy)
streamed = list(pieces)
messages = [{"role": "user", "content": prompt}]
chat = client.chat.completions.create(messages=messages, logprobs=True, top_logprobs=2, n=2, **greedy)
said = client.chat.completions.create(messages=messages, stream=True, **greedy)
try:
    client.completions.create(prompt=prompt, model="unknown")
    refused = None
except openai.NotFoundError as error:
    refused = error.body["message"]
print(
    json.dumps(
        {
            "version": openai.__version__,
            "model": model,
            "retrieved": client.models.retrieve(model).id,
            "completion": whole.choices[0].text,
            "logprobs": whole.choices[0].logprobs.token_logprobs,
            "usage": whole.usage.model_dump(),
            "streamed": "".join(piece.choices[0].text for piece in streamed if piece.choices),
            "streamed_usage": streamed[-1].usage.total_tokens,
            "chat": [choice.message.content for choice in chat.choices],
            "chat_logprobs": len(chat.choices[0].logprobs.content),
            "chat_streamed": "".join(piece.choices[0].delta.content or "" for piece in said),
            "refused": refused,
        }
    )
)
