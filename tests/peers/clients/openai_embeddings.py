"""openai's client against a retriever: URL, JSON list of texts -> JSON [names of models, vectors]."""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0)
models = [model.id for model in client.models.list()]
answer = client.embeddings.create(model=models[0], input=json.loads(sys.argv[2]))
print(json.dumps([models, [item.embedding for item in answer.data]]))
